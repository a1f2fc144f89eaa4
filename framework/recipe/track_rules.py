"""Rules of `track.wandb`: names that wandb would refuse when the run begins, whose telemetry would be lost. wandb checks lengths
and characters in `wandb.Settings` (wandb/sdk/wandb_settings.py); an unknown team only its server refuses."""

from collections.abc import Iterator

from framework.recipe.problem import Problem
from framework.recipe.schema import Recipe

PROJECT_CHARACTERS, TAG_CHARACTERS = 128, 64
NOT_IN_PROJECTS = "/\\#?%:"


def find_wandb_problems(recipe: Recipe) -> Iterator[Problem]:
    wandb = recipe.track.wandb
    yield from _project(wandb.project)
    for key in ("entity", "group"):
        name = getattr(wandb, key)
        if name is not None and (not name.strip() or len(name) > PROJECT_CHARACTERS):
            message = f"names nothing: 1 to {PROJECT_CHARACTERS} characters"
            yield Problem(f"track.wandb.{key}", name, message, f"leave it out (track.wandb.{key}=null)")
    if wandb.entity is not None and "/" in wandb.entity:
        entity, _, project = wandb.entity.partition("/")
        yield Problem("track.wandb.entity", wandb.entity, "is a user or a team alone", _write(entity, project))
    for tag in wandb.tags:
        if not 0 < len(tag) <= TAG_CHARACTERS:
            message = f"wandb takes tags of 1 to {TAG_CHARACTERS} characters, and one has {len(tag)}: {tag[:20]!r}"
            yield Problem("track.wandb.tags", wandb.tags, message, "shorten it, or leave it out")


def _project(project: str) -> Iterator[Problem]:
    key, (entity, _, rest) = "track.wandb.project", project.partition("/")
    if not project.strip():
        yield Problem(key, project, "names no project", f"{key}=meshwright")
    elif len(project) > PROJECT_CHARACTERS:
        message = f"wandb takes at most {PROJECT_CHARACTERS} characters, and it has {len(project)}"
        yield Problem(key, project, message, "shorten it")
    elif found := [character for character in NOT_IN_PROJECTS if character in project]:
        is_path = found == ["/"] and entity and rest and "/" not in rest
        message = f"wandb takes none of {' '.join(NOT_IN_PROJECTS)} in a project's name"
        plain = "".join("-" if character in NOT_IN_PROJECTS else character for character in project)
        yield Problem(key, project, message, _write(entity, rest) if is_path else f"{key}={plain}")


def _write(entity: str, project: str) -> str:
    return f"track.wandb.entity={entity}" + (f" track.wandb.project={project}" if project else "")
