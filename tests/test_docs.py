"""The tool that keeps the pages of docs/ current runs their examples, and nothing else of them."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
spec = importlib.util.spec_from_file_location("rerun", DOCS / "rerun.py")
assert spec and spec.loader
rerun = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rerun)

PAGE = """Prose with `false`, and a block that is no example:

```console
$ false
```

```console
$ meshwise list clusters \\
    | grep -c selene
old output
```

Prose with `false`.

```python
one = 1
```

```python
print(one_and := 2, "text")
```

```text
```
"""


def test_examples_are_run_and_the_rest_is_left_alone() -> None:
    done = rerun.rerun(PAGE)
    assert done == PAGE.replace("old output", "1").replace("```text\n", "```text\n2 text\n")
    assert rerun.rerun(done) == done


def test_a_failing_example_stops_the_tool() -> None:
    with pytest.raises(Exception, match="returned non-zero exit status 2"):
        rerun.rerun("```console\n$ meshwise estimate gpt5 2>&1\n```\n")


PAGES = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.parent.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_and_links_of_a_page_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
