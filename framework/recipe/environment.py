"""Variables of the ranks (launch.environment), and the secrets in them and elsewhere that must not be shown.

A value is plain text, or it refers to a variable of the environment in which the ranks are started:

    launch.environment:
      NCCL_DEBUG: WARN
      HF_TOKEN: ${oc.env:HF_TOKEN}
      https_proxy: http://me:${oc.env:PROXY_PASSWORD}@proxy:3128

A reference stays a reference in recipe.yaml, in run.json and in the job's script; it is read where the ranks are started, on
each start anew. So no file, no log and no tracker ever holds a secret.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from framework.errors import RecipeError
from framework.recipe.schema import Recipe

_KEY = "launch.environment"

_REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}")
_WRITTEN = re.compile(r"(\\*)" + _REFERENCE.pattern)
# A reference to the environment in another form: with a default, or inside of another interpolation.
_OTHER_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{[^}]*oc\.env")
_PASSWORD = re.compile(r"(://[^/\s:@]*:)(?!\$)[^/\s@]+(?=@)")
_ASSIGNMENT = re.compile(
    r"(^|[\s;,&(='\"])([A-Za-z_][A-Za-z0-9_]*)=('[^'=]*'|\"[^\"=$`]*\"|[^\s;,&)$`]+)"
)  # of a value, not of what $ and ` give
_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?![A-Z])|(^|_)(API|ACCESS|PRIVATE)?KEYS?(_ID)?$|(^|_)PASS$|_(PWD|PAT)$"
)
# Tokens by their prefixes (Hugging Face, OpenAI and others, GitHub, GitLab, AWS, Slack, Google), headers of HTTP, JSON web
# tokens, private keys.
_LITERAL = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)[\w-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?)"
    r"|(?<=Bearer )(?=\S*\d)[\w.~+/=-]{8,}|(?<=Authorization: Bearer )[^\s'\"$]+|(?<=Authorization: Basic )[^\s'\"$]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*"
)
_PLACE_NAME = re.compile(r"_(FILE|PATH|DIR)$")  # of a file that holds a secret, such as HF_TOKEN_PATH
_FLAGS = ("", "0", "1", "true", "false", "yes", "no", "on", "off")
HIDDEN = "***"


def keep_references(text: str) -> str:
    """Escape references to the environment, so that OmegaConf resolves the text to itself. Raises ValueError for other ways of
    reading the environment, whose value would be in the recipe."""
    kept = _WRITTEN.sub(lambda found: found[0] if len(found[1]) % 2 else f"{found[1]}\\${{oc.env:{found[2]}}}", text)
    if _OTHER_REFERENCE.search(kept):
        raise ValueError(
            "read where the ranks start is only ${oc.env:NAME}, without a default and not inside of another ${}"
        )
    return kept


def names_in(value: object) -> list[str]:
    """The variables that a value refers to."""
    return _REFERENCE.findall(str(value))


def fill(variables: Mapping[str, object], around: Mapping[str, str]) -> dict[str, str]:
    """The variables as a process gets them, references read from `around`. Raises RecipeError for those that are missing."""
    missing = {name: [each for each in names_in(value) if not around.get(each)] for name, value in variables.items()}
    lines = [
        f"{_KEY}.{name} refers to {each}, which is not set here, or empty: export {each}, or leave it out (~{_KEY}.{name})"
        for name, names in missing.items()
        for each in names
    ]
    if lines:
        raise RecipeError("\n".join(lines))
    return {name: _REFERENCE.sub(lambda found: around[found[1]], str(value)) for name, value in variables.items()}


def shell_word(value: object) -> str:
    """A value as a word of bash, which reads the references and nothing else in it."""
    parts = _REFERENCE.split(str(value))  # text, name, text, name, ..., text
    words = [f'"${{{part}}}"' if index % 2 else shlex.quote(part) for index, part in enumerate(parts) if part]
    return "".join(words) or "''"


def is_secret(name: str, value: object) -> bool:
    """Whether `name=value` seems to contain a secret, by its name or a password in a URL. A reference is none."""
    if isinstance(value, int) and abs(value) >= 100_000:  # a password of digits is a number in YAML; others are counts
        value = str(value)
    if not isinstance(value, str):
        return False
    is_named = _SECRET_NAME.search(name.upper()) and not _PLACE_NAME.search(name.upper())
    is_given = value.lower() not in _FLAGS and not names_in(value)
    return bool((is_named and is_given) or _PASSWORD.search(_REFERENCE.sub("", value)) or looks_secret(value))


def looks_secret(text: str) -> bool:
    """Whether the text contains a token or a key, by its form."""
    return _LITERAL.search(text) is not None


def secret_in(line: str) -> str | None:
    """Name of a secret that a line of shell contains, such as `export HF_TOKEN=hf_...`; None where it only reads one."""
    given = (name for _, name, value in _ASSIGNMENT.findall(line) if is_secret(name, value.strip("'\"")))
    return next(given, "PASSWORD" if _PASSWORD.search(line) else "TOKEN" if looks_secret(line) else None)


def is_private(key: str, value: object) -> bool:
    """Whether a message must not show the value of this key: of launch.environment, or of a key that was meant to be one."""
    path = key.lstrip("+~-")
    name = path.rpartition(".")[2]
    is_around = path == "launch" and "env" in str(value)
    return is_around or path.startswith("launch.env") or bool(name.isupper() and _SECRET_NAME.search(name))


def hide_secrets(text: str) -> str:
    """The text without passwords of URLs, tokens, and values that it assigns to names of secrets."""
    without = _LITERAL.sub(HIDDEN, _PASSWORD.sub(rf"\1{HIDDEN}", text))

    def hide(found: re.Match[str]) -> str:
        before, name, value = found.groups()
        return f"{before}{name}={HIDDEN}" if is_secret(name, value.strip("'\"")) else found[0]

    return _ASSIGNMENT.sub(hide, without)


def hide_override(text: str) -> str:
    """An override of the command line as it may be shown: `launch.environment.HF_TOKEN=***`."""
    key, equals, value = text.partition("=")
    return f"{key}={HIDDEN}" if equals and is_private(key, value) else hide_secrets(text)


def describe_public(recipe: Recipe) -> dict[str, Any]:
    """The recipe for trackers: launch.environment without values, launch.set_up as a number of lines, URLs without passwords."""
    tree = hide_in(asdict(recipe))
    launch = recipe.launch
    tree["launch"] |= {"environment": sorted(launch.environment), "set_up": f"{len(launch.set_up)} lines"}
    return tree


def hide_in(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: hide_in(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(hide_in(element) for element in value)
    return hide_secrets(value) if isinstance(value, str) else value
