"""What is secret: it travels in the environment alone, never in a script, a plan, a settings file or an argument.

A variable is taken for secret by its name or by its value. Names are read word by word, so that MONKEY, KEYBOARD and
TOKENIZERS_PARALLELISM are none; a name that ends with what is known *about* a secret (SSH_KEY_PATH, TOKEN_COUNT,
SECRET_NAME) is none either. In doubt a variable counts as secret: all that it loses is its line in the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

HIDDEN = "<secret: in the environment only>"
_Value = TypeVar("_Value")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that name a secret wherever they stand; those that do at the end of a longer name; endings of one word.
_ALWAYS = _words(
    "SECRET SECRETS TOKEN PASSWORD PASSWORDS PASSWD PASSPHRASE CREDENTIAL CREDENTIALS CREDS APIKEY BEARER JWT"
)
_LAST = _words("KEY PASS PWD PW PAT AUTH COOKIE DSN")
_ENDINGS = (
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "APIKEY",
    "ACCESSKEY",
    "SECRETKEY",
    "AUTHTOKEN",
    "SSHPASS",
    "DBPASS",
    "BINDPW",
)
# A key of these kinds, also when more follows: AWS_ACCESS_KEY_ID, API_KEYS, PRIVATE_KEY_PEM.
_KEY = re.compile(r"(?:^|_)(?:API|ACCESS|PRIVATE|SECRET)_?KEYS?(?:_|$)")
# Last words of names that hold no secret, but something about one.
_ABOUT = _words(
    "PATH PATHS FILE FILES FILENAME DIR FOLDER NAME NAMES TYPE TYPES COUNT COUNTS SIZE LENGTH LEN LIMIT BUDGET MAX MIN "
    "NUM TTL TIMEOUT EXPIRY EXPIRES MODE ENABLED DISABLED REQUIRED ENDPOINT HOST PORT USER SOCK ALGORITHM FORMAT "
    "INDEX DIM DROPOUT EMBEDDING EMBEDDINGS RATE RATIO WEIGHT URL URI"
)
# What stands before the last word where that is none of a secret: SORT_KEY, TWO_PASS, FILE_PAT, OLD_PWD, PAD_TOKEN.
_HARMLESS = {
    "KEY": _words("PUBLIC PUB SORT PRIMARY FOREIGN PARTITION CACHE METRIC LABEL IMAGE TEXT INPUT OUTPUT PIPE STATE"),
    "PASS": _words("FORWARD BACKWARD SINGLE TWO ONE FIRST SECOND MULTI PER LOW HIGH BAND"),
    "PWD": _words("OLD INIT PROJECT WORK LOGICAL START"),
    "PAT": _words("FILE GLOB NAME PATH SEARCH INCLUDE EXCLUDE"),
    "AUTH": _words("USE NO ENABLE DISABLE REQUIRE SKIP"),
    "TOKEN": _words("PAD BOS EOS UNK SEP CLS MASK SPECIAL IMAGE START END STOP"),
}

# A URL with a password (not one that the shell puts in), and the forms in which services give out their tokens.
_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/@:]*:(?!\d+/)(?!\$\{?\w+\}?@)[^\s@]+@", re.IGNORECASE)
_TOKENS = re.compile(
    r"(?<![\w-])(?:"
    r"gh[pousr]_[A-Za-z0-9]{12,}|github_pat_\w{12,}|glpat-[\w-]{12,}"
    r"|(?:hf_|sk-(?:[a-z]+-)*)(?:[A-Za-z0-9_-]{24,}|(?=[A-Za-z]*\d)[A-Za-z0-9]{10,})"
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|(?:npm_|pypi-)[\w-]{30,}"
    r"|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*|(?:sk|rk)_live_\w{10,}"
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----|https://hooks\.slack\.com/services/\S+"
    r"|https?://(?=\w*\d)\w{20,}@"
    # as databases and storages write them: `password=…;`, `AccountKey=…`
    r"|(?<![\w-])(?i:password|pwd(?!=[/~.])|accountkey|sharedaccesskey)=(?!(?i:true|false|none|null)\b)"
    r"[^\s\"'$`;&<]{4,}"
)
_ASSIGNED = re.compile(
    r"(?<![\w.$])(?:(?:export|declare -x)\s+([A-Za-z]\w*)|([A-Z][A-Z0-9_]*))=(?=[\"']?[^\s\"'$`;|&])", re.ASCII
)
# An option that can't mean but a secret, with its value: --token and --key may be a tokenizer's or a dict's.
_OPTION = re.compile(
    r"(?<![\w-])(?!-+(?:no|ask)[-_])(--?(?:[\w-]*[-_])?"
    r"(?:password|passwd|passphrase|api[-_]?key|secret[-_]key|access[-_]key|client[-_]secret"
    r"|(?:auth|api|access|hf|hub|wandb|github)[-_]token))(?:=|\s+)[\"']?"
    r"(?!(?:true|false|none|null)\b)[^\s\"'$`<-][^\s\"']{5,}",
    re.IGNORECASE,
)


def is_secret(name: str, value: object = None) -> bool:
    """Whether a variable of this name (WANDB_API_KEY, HF_TOKEN, PGPASSWORD, GITHUB_PAT, …) holds a secret, or one with
    this value."""
    return _named(name.upper()) or looks_secret(value)


def _named(name: str) -> bool:
    words = [word.rstrip("0123456789") or word for word in name.split("_") if word]
    if not words:
        return False
    if words[-1] in ("ID", "IDS") and words[-2:-1] == ["TOKEN"]:  # PAD_TOKEN_ID
        words = words[:-1]
    if _KEY.search(name) and (words[-1] not in _ABOUT or name.endswith("_KEY_ID")):
        return True
    last, before = words[-1], words[-2:-1]
    if last in _ABOUT or set(before) & _HARMLESS.get(last, frozenset()):
        return False
    ends = last.endswith(_ENDINGS) or (last in _LAST and len(words) > 1)
    return ends or not _ALWAYS.isdisjoint(words)


def looks_secret(value: object) -> bool:
    """Whether a text is or has in it what only a secret looks like: a URL with a password, a token of a service."""
    text = getattr(value, "text", value)  # of shell text
    return isinstance(text, str) and bool(_PASSWORD.search(text) or _TOKENS.search(text))


def within(text: str) -> str | None:
    """What in a text (lines of shell, an option) is a secret, in words; None if nothing is."""
    if _PASSWORD.search(text):
        return "a URL with a password"
    if _TOKENS.search(text):
        return "an access token"
    assigned = (match[1] or match[2] for match in _ASSIGNED.finditer(text))
    named = next((name for name in assigned if _named(name.upper())), None)
    option = _OPTION.search(text)
    named = named or (option[1] if option else None)
    return f"the value of {named}" if named else None


def without(variables: Mapping[str, _Value]) -> dict[str, _Value]:
    """The variables that may be written down."""
    return {name: value for name, value in variables.items() if not is_secret(name, value)}


def only(variables: Mapping[str, _Value]) -> dict[str, _Value]:
    """The others."""
    return {name: value for name, value in variables.items() if is_secret(name, value)}


def shown(name: str, value: Any) -> Any:
    """A value as a plan or a listing shows it."""
    text = value.get("shell") if isinstance(value, dict) else value
    return HIDDEN if is_secret(name, text) else value
