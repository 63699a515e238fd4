"""argparse's parser, whose values may also come from YAML files.

parser = phalanx.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
args = parser.parse_args()      # python train.py -c base.yaml -c ddp.yaml --lr 1e-3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NoReturn, TypeAlias

from ..config.text import free, is_null
from ..config.tree import Leaf, leaves
from ..config.yamlfile import read_file, write
from ..errors import ConfigError, did_you_mean
from .argument_values import from_yaml, read_bool, to_yaml


class _ConfigFile(argparse.Action):
    """-c FILE"""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        assert isinstance(parser, ArgumentParser)
        parser._parse.files.append(rest[1])


class _PrintConfig(argparse.Action):
    """--print-config"""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        assert isinstance(parser, ArgumentParser)
        parser._parse.print_config = True


class _Ignored(argparse.Action):
    """What launchers add to a script's arguments, in a script that doesn't declare it."""

    def __call__(self, *_: Any) -> None:
        pass


_OWN = (_ConfigFile, _PrintConfig, _Ignored)
_NOT_SETTINGS = (*_OWN, argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)

_Requirable: TypeAlias = "argparse.Action | argparse._MutuallyExclusiveGroup"


@dataclass
class _Parse:
    """What one call of parse_args has seen so far."""

    files: list[str] = field(default_factory=list)
    print_config: bool = False
    taken: list[argparse.Action] = field(default_factory=list)  # also positionals that took no word
    given: list[argparse.Action] = field(default_factory=list)
    words: dict[str, Any] = field(default_factory=dict)


class Suggesting(argparse.ArgumentParser):
    """argparse.ArgumentParser that names the nearest option where one is misspelt."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._all_known(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._all_known(*self.parse_known_intermixed_args(args, namespace))

    def _all_known(self, namespace: Any, rest: list[str]) -> Any:
        if rest:
            self._fail(f"unrecognized arguments: {' '.join(rest)}{self._nearest(rest)}")
        return namespace

    def _nearest(self, rest: Sequence[str]) -> str:
        """For each option among them that resembles one of ours."""
        bare = {name.lstrip(self.prefix_chars): name for name, action in self._option_string_actions.items()
                if action.help != argparse.SUPPRESS}  # fmt: skip
        options = [word.partition("=")[0].lstrip(self.prefix_chars) for word in rest if word[:1] in self.prefix_chars]
        near = [match for option in options for match in get_close_matches(option, list(bare), n=1)]
        hints = "".join(f" Did you mean {bare[name]!r}?" for name in dict.fromkeys(near))
        return f".{hints}" if hints else ""

    def _fail(self, message: str) -> NoReturn:
        if self.exit_on_error:
            self.error(message)
        raise argparse.ArgumentError(None, message)


class ArgumentParser(Suggesting):
    """argparse.ArgumentParser with `-c/--config FILE` (repeatable, later wins) and `--print-config`.

    A file's keys are `dest` names (`-` and `_` are the same, nested mappings join with dots); flags win over
    files, files over defaults. Required arguments may come from a file. Text is converted by the argument's
    own `type`; `type=bool` reads true and false. Faults in a file end the program with exit code 2, as
    argparse's own do. `--local-rank`, `--deepspeed` and `--deepspeed_config`, which launchers add, are
    accepted undeclared and left out of the namespace. A misspelt option or key gets the nearest one named.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", bool, read_bool)
        self._parse = _Parse()
        self._parsing = False
        self._lifted: list[_Requirable] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._with_files(super().parse_known_args, args, namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._with_files(super().parse_known_intermixed_args, args, namespace)

    def format_help(self) -> str:
        self._add_own_options()
        with self._required(self._lifted, True):
            return super().format_help()

    def format_usage(self) -> str:
        self._add_own_options()
        with self._required(self._lifted, True):
            return super().format_usage()

    def _with_files(self, parse: Callable[[Any, Any], Any], args: Any, namespace: Any) -> Any:
        if self._parsing:  # parse_known_intermixed_args calls parse_known_args
            return parse(args, namespace)
        self._add_own_options()
        self._parse, self._parsing = _Parse(), True
        try:
            # A file may have what is required, and which files there are is known only at the end.
            candidates: list[_Requirable] = [*self._actions, *self._mutually_exclusive_groups]
            self._lifted = [item for item in candidates if item.required]
            with self._required(self._lifted, False):
                namespace, rest = parse(args, namespace)
            return self._finish(namespace), rest
        finally:
            self._parsing, self._lifted = False, []

    def _finish(self, namespace: argparse.Namespace) -> argparse.Namespace:
        found = self._from_files()
        for dest, value in found.items():
            setattr(namespace, dest, value)
        if self._parse.print_config:
            self._print_message(write(self._printable(namespace)), sys.stdout)
            self.exit()
        self._check_required(found)
        return namespace

    def _add_own_options(self) -> None:
        """Late, so that the script's own options of the same names are kept."""
        if any(isinstance(action, _OWN) for action in self._actions):
            return
        dash = "-" if "-" in self.prefix_chars else self.prefix_chars[0]
        self._offer(
            [f"{dash}c", f"{dash * 2}config"],
            action=_ConfigFile,
            metavar="FILE",
            help="YAML file of arguments; may be repeated, the later file wins, and flags win over files",
        )
        self._offer([f"{dash * 2}print-config"], action=_PrintConfig, nargs=0, help="print all values as YAML and exit")
        hidden: dict[str, Any] = {"action": _Ignored, "help": argparse.SUPPRESS}
        self._offer(["--local_rank", "--local-rank"], **hidden)
        self._offer(["--deepspeed_config", "--deepspeed-config"], **hidden)
        self._offer(["--deepspeed"], nargs=0, **hidden)

    def _offer(self, names: list[str], **options: Any) -> None:
        declared = [self._option_string_actions[name] for name in names if name in self._option_string_actions]
        free_names = [name for name in names if name not in self._option_string_actions]
        if declared and options["action"] is _Ignored:
            # Launchers differ in the spelling; the script's one declaration takes both.
            self._option_string_actions.update(dict.fromkeys(free_names, declared[0]))
        elif free_names and all(name[0] in self.prefix_chars for name in free_names):
            self.add_argument(*free_names, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, **options)

    def _get_option_tuples(self, option_string: str) -> Any:
        """Abbreviations are of the script's options first, and never of hidden ones."""
        found = super()._get_option_tuples(option_string)
        scripts = [match for match in found if not isinstance(match[0], _OWN)]
        return scripts or [match for match in found if not isinstance(match[0], _Ignored)]

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.nargs != argparse.SUPPRESS:  # else a first pass over options alone
            self._parse.taken.append(action)
        if action.option_strings or arg_strings:
            self._parse.given.append(action)
            self._parse.words[action.dest] = " ".join(arg_strings)
        return super()._get_values(action, arg_strings)

    @contextmanager
    def _required(self, items: Sequence[_Requirable], required: bool) -> Iterator[None]:
        """Set whether `items` are required, for a while."""
        before = [item.required for item in items]
        for item in items:
            item.required = required
        try:
            yield
        finally:
            for item, was in zip(items, before, strict=True):
                item.required = was

    def _check_required(self, found: dict[str, Any]) -> None:
        """argparse's own check, which was lifted since a file may have what is required."""
        seen = self._parse

        def missing(actions: Iterable[argparse.Action], where: list[argparse.Action]) -> list[argparse.Action]:
            return [action for action in actions if action not in where and found.get(action.dest) is None]

        def names(actions: Iterable[argparse.Action]) -> list[str]:
            return [str(argparse._get_action_name(action)) for action in actions]

        lacking = missing([action for action in self._actions if action in self._lifted], seen.taken)
        if lacking:
            self._fail(f"the following arguments are required: {', '.join(names(lacking))}")
        for group in self._mutually_exclusive_groups:
            members = group._group_actions
            if group in self._lifted and missing(members, seen.given) == members:
                self._fail(f"one of the arguments {' '.join(names(members))} is required")

    def _settings(self) -> dict[str, list[argparse.Action]]:
        """Each dest that a file may set, with the arguments that set it."""
        found: dict[str, list[argparse.Action]] = {}
        for action in self._actions:
            if action.dest != argparse.SUPPRESS and not isinstance(action, _NOT_SETTINGS):
                found.setdefault(action.dest, []).append(action)
        for dest, value in self._defaults.items():
            if value is None or isinstance(value, (bool, int, float, str)):
                found.setdefault(dest, [])
        return found

    def _from_files(self) -> dict[str, Any]:
        """The files' values by dest, without those that a flag replaces."""
        settings = self._settings()
        found: dict[str, tuple[Any, Leaf]] = {}
        for file in self._parse.files:
            values = self._read(file, list(settings))
            for dest, leaf in values.items():
                rivals = set[str]() if is_null(leaf.value) else self._rivals(dest)
                for rival in rivals & {key for key, other in values.items() if not is_null(other.value)}:
                    self._fail(f"{leaf.origin}: {dest!r} and {rival!r} exclude each other")
                for rival in rivals:
                    found.pop(rival, None)
                found[dest] = (self._convert(dest, settings[dest], leaf), leaf)
        flags = {action.dest for action in self._parse.given}
        for dest in flags.union(*map(self._rivals, flags)):
            found.pop(dest, None)
        self._parse.words.update({dest: leaf.value for dest, (_, leaf) in found.items()})
        return {dest: value for dest, (value, _) in found.items()}

    def _rivals(self, dest: str) -> set[str]:
        """The other dests of `dest`'s mutually exclusive groups."""
        groups = [{action.dest for action in group._group_actions} for group in self._mutually_exclusive_groups]
        return set[str]().union(*(group for group in groups if dest in group)) - {dest}

    def _read(self, file: str, known: list[str]) -> dict[str, Leaf]:
        spelt = {dest.replace("-", "_"): dest for dest in known}
        try:
            tree = read_file(file)
        except ConfigError as error:
            self._fail(str(error))
        values: dict[str, Leaf] = {}
        for path, leaf in leaves(tree):
            key = ".".join(path)
            dest = spelt.get(key.replace("-", "_"))
            if dest is None:
                self._fail(f"{leaf.origin}: unknown key {key!r}.{did_you_mean(key.replace('-', '_'), known)}")
            if dest in values:
                self._fail(f"{leaf.origin}: {key!r} is set twice, in two spellings")
            values[dest] = leaf
        return values

    def _convert(self, dest: str, actions: list[argparse.Action], leaf: Leaf) -> Any:
        if is_null(leaf.value):
            return None
        if not actions:  # known from set_defaults only, so there is no type
            return free(leaf.value)
        try:
            return from_yaml(self, actions, leaf.value)
        except argparse.ArgumentError as error:
            self._fail(f"{leaf.origin}: {dest}: {error.message}")

    def _printable(self, namespace: argparse.Namespace) -> dict[str, Any]:
        values = {dest: getattr(namespace, dest) for dest in self._settings() if hasattr(namespace, dest)}
        return {dest: to_yaml(value, self._parse.words.get(dest)) for dest, value in values.items()}
