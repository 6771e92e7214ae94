"""README and guides do what they show, and the API pages name all that is public. (`make docs` builds the site.)"""

import inspect
import re
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import pytest

import jax_fp4 as fp4
from jax_fp4 import linen, nnx

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/guides").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_a_page_does_what_it_shows(page):
    """Its Python blocks run, in order."""
    names = {}
    for block in blocks(page):
        exec(block, names)


def test_the_error_that_the_readme_quotes():
    with pytest.raises(ValueError, match="kernel is of shape") as error:
        fp4.dense(jnp.zeros((64, 256)), jnp.zeros((100, 128)), recipe=fp4.NVFP4BlockScaling())
    assert str(error.value) in (ROOT / "README.md").read_text()


def documented() -> set[str]:
    """What the pages below docs/api show, by its full name."""
    names = set()
    for page in (ROOT / "docs/api").glob("*.md"):
        module = ""
        for kind, name, members in re.findall(
            r"^\.\. (\w+):: ([\w.]+)\n(?:   :members: ([\w, ]+)\n)?", page.read_text(), re.MULTILINE
        ):
            if kind in ("currentmodule", "automodule"):
                module = name
                names.update(f"{name}.{member}" for member in members.split(", "))
            else:
                names.add(name if name.startswith("jax_fp4.") else f"{module}.{name}")
    return names


def public(module: ModuleType) -> set[str]:
    """What the package imports as itself, and of its public modules what they define or say in `__all__`."""

    def is_own(value) -> bool:
        return module is fp4 or getattr(value, "__module__", None) == module.__name__

    names = {name for name, value in vars(module).items() if not inspect.ismodule(value) and is_own(value)}
    return {f"{module.__name__}.{name}" for name in getattr(module, "__all__", names) if not name.startswith("_")}


def test_everything_public_is_on_an_api_page():
    modules = fp4.checkpoint_policies, fp4.checkpoints, fp4.delayed, fp4.diagnostics, fp4.export
    missing = set.union(*map(public, (fp4, linen, nnx, *modules))) - documented()
    assert not missing  # that what the pages show is there, `make docs` says


def test_links_of_the_pages_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
