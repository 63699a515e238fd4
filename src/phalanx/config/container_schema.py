"""Settings of containers: the image and what it sees of the host."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from .section import Section, TextList


class ContainerSettings(Section):
    image: str | None = Field(default=None, description="image of the ranks: a .sif file or a folder")
    binds: TextList = Field(default=(), description="folders of the host: /data, /host:/inside or /data:/data:ro")
    gpu: Literal["auto", "nv", "rocm", "none"] = Field(default="auto", description="whose GPUs the image gets")
    clean_env: bool = Field(default=False, description="hide the host's environment, but for the ranks' own variables")
    home: str | None = Field(default=None, description="home folder inside; none: no home; unset: the host's")
    pre: str | None = Field(default=None, description="bash lines inside the container, before the ranks")
    packages: str | None = Field(default=None, description="folder of `container prepare`; unset: IMAGE.phalanx")
    args: TextList = Field(default=(), description="more options for `exec`, as words")
    executable: str | None = Field(default=None, description="the program; unset: the runtime's name")
    cache: str | None = Field(default=None, description="APPTAINER_CACHEDIR: where pulled layers lie; not in $HOME")
    tmp: str | None = Field(default=None, description="APPTAINER_TMPDIR: room for building images")

    @field_validator("pre", mode="before")
    @classmethod
    def _lines(cls, value: Any) -> Any:
        return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else value

    @field_validator("args")
    @classmethod
    def _options(cls, words: TextList) -> TextList:
        for word in words:
            if not word.startswith("-"):
                raise ValueError(f"{word!r} is no option: expected words such as --name=value")
        return words
