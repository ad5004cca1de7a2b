"""A JupyterLab of the tests' own, and a notebook that is open in it, as a reader's hands and eyes would use it."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, Route
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

ROOT = Path(__file__).resolve().parents[2]
OPENS_MS, RUNS_MS, MOVES_MS = 120_000, 600_000, 60_000
"""Limits, not waits: a notebook opens, all of its cells run, a moved control shows."""
QUIET = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/apputils-extension:themes": {"theme": "JupyterLab Light"},
}
NUMBERS = ["x", "y", "z", "base"]
"""What of a trace is compared between page and kernel."""
SHOWN = f"""output => {{
    const plain = value => value && typeof value === 'object' ? Array.from(value, plain) : value;
    const numbers = trace => Object.fromEntries({NUMBERS}.filter(k => k in trace).map(k => [k, plain(trace[k])]));
    const figure = output.querySelector('.js-plotly-plot');
    const words = Array.from(output.querySelectorAll('.widget-html-content'), one => one.innerText);
    return {{
        title: figure.layout.title.text,
        data: figure.data.map(numbers),
        words: words.join(' ').split(/\\s+/).join(' ').trim(),
    }};
}}"""
DIFFERS = f"([output, before]) => JSON.stringify(({SHOWN})(output)) !== JSON.stringify(before)"
FOLLOWS = f"""([output, said]) => {{
    const {{title, data, words}} = ({SHOWN})(output);
    return title === said.title && JSON.stringify(data) === JSON.stringify(said.data) && words.includes(said.sentence);
}}"""
NUMBERS_IN_KERNEL = f"[{{{{k: t[k] for k in {NUMBERS} if k in t}}}} for t in {{}}.figure.to_dict()['data']]"
PATIENCE = "const limit = AbortSignal.timeout; AbortSignal.timeout = ms => limit.call(AbortSignal, 30 * ms);"
"""anywidget gives a figure two seconds to load, which cores that run other tests may not have."""
KERNEL = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"


@contextmanager
def running_lab(folder: Path, work: Path, settings: dict[str, Any] | None = None) -> Iterator[str]:
    """Serve `folder` on a free port with a token, with settings and workspaces of its own in `work`; yields the URL."""
    (work / "config" / "labconfig").mkdir(parents=True)
    overrides = json.dumps(QUIET | (settings or {}))
    (work / "config" / "labconfig" / "default_setting_overrides.json").write_text(overrides)
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += ["--ServerApp.port=0", "--ServerApp.ip=127.0.0.1", f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={folder}", "--LabApp.extension_manager=readonly"]
    places = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
    own = {f"JUPYTER_{name}": str(work / place) for name, place in places.items()}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(work / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(work / "workspaces")}
    own |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))}
    server = subprocess.Popen(command, env=os.environ | own, stderr=subprocess.PIPE, text=True)
    try:
        yield f"{_address(server)}?token={token}"
    finally:
        server.terminate()
        server.wait()


def _address(server: subprocess.Popen[str]) -> str:
    """Where the server says that it listens; what it says later is read and dropped, so that it never blocks."""
    said = []
    assert server.stderr is not None
    for line in server.stderr:
        said.append(line)
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        if found:
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return found[0]
    raise RuntimeError("JupyterLab did not start:\n" + "".join(said))


class OpenNotebook:
    """A notebook in a page of its own; `problems` are what the console and the network complained about."""

    def __init__(self, page: Page, lab: str, name: str) -> None:
        """Open the notebook `name` of the server at the URL `lab`; returns when its kernel waits for work."""
        self.page, self.problems = page, problems_of(page, allowed=lab.split("?")[0])
        page.add_init_script(PATIENCE)
        where, token = lab.split("?")
        page.goto(f"{where}lab/tree/{name}?reset&{token}")
        page.wait_for_function(f"() => {KERNEL}.status === 'idle'".replace(".", "?."), timeout=OPENS_MS)

    @property
    def figures(self) -> Locator:
        """The drawn figures, in order."""
        return self.page.locator(".jp-Notebook .js-plotly-plot:has(.main-svg)")

    @property
    def output(self) -> Locator:
        """The output that has controls: the explorer's."""
        controls = self.page.locator(".noUi-handle, select")
        return self.page.locator(".jp-OutputArea-output", has=controls)

    def run_all(self) -> None:
        """Run all cells and wait until the last has run."""
        run = "window.jupyterapp.commands.execute('notebook:run-all-cells')"
        self.page.evaluate(f"() => {{ {run}.finally(() => {{ window.hasRun = true }}) }}")
        self.page.wait_for_function("() => window.hasRun", timeout=RUNS_MS)

    def code_cells(self) -> list[dict[str, Any]]:
        """The code cells as they would be saved."""
        cells = "window.jupyterapp.shell.currentWidget.content.model.sharedModel.toJSON().cells"
        return [cell for cell in self.page.evaluate(f"() => {cells}") if cell["cell_type"] == "code"]

    def ask(self, expression: str) -> Any:
        """The value of a Python expression in the notebook's kernel, by way of JSON."""
        code = f"__import__('json').dumps({expression}, default=lambda array: array.tolist())"
        ask = """async ([kernel, code]) => {
            const wanted = {code: '', user_expressions: {value: code}, store_history: false};
            return (await eval(kernel).requestExecute(wanted).done).content.user_expressions.value;
        }"""
        said = self.page.evaluate(ask, [KERNEL, code])
        assert said["status"] == "ok", said
        return json.loads(ast.literal_eval(said["data"]["text/plain"]))

    def control(self, label: str) -> Locator:
        """What takes the keyboard of the control with a label: a slider's handle or a menu."""
        labelled = self.output.locator(
            ".widget-inline-hbox", has=self.page.locator(f'.widget-label:text-is("{label}")')
        )
        return labelled.locator(".noUi-handle, select")

    def shown(self) -> dict[str, Any]:
        """The figure's title and numbers, and the sentences beside it, as the page has them."""
        return finite(self.output.evaluate(SHOWN))

    def shown_after(self, before: dict[str, Any], explorer: str, twin: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is shown once it has left `before` and follows what the kernel says; and that.

        A page that never follows is returned as it is at the limit.
        """
        output = self.output.element_handle()
        self.page.wait_for_function(DIFFERS, arg=[output, before], timeout=MOVES_MS)
        said = self.said(explorer, twin)
        with suppress(PlaywrightTimeoutError):
            self.page.wait_for_function(FOLLOWS, arg=[output, said], timeout=MOVES_MS)
        return self.shown(), said

    def said(self, explorer: str, twin: str) -> dict[str, Any]:
        """The state of an explorer in the kernel, and what its `twin`, which no page shows, says of that state.

        The figure of the explorer itself would be no oracle: the page writes into it.
        """
        self.ask(f"{twin}.set(**{explorer}.state)")
        return {
            "state": self.ask(f"{explorer}.state"),
            "sentence": " ".join(self.ask(f"{twin}.sentence").split()),
            "title": self.ask(f"{twin}.figure.layout.title.text"),
            "data": finite(self.ask(NUMBERS_IN_KERNEL.format(twin))),
        }

    def close(self) -> None:
        """Shut the kernel down and close the page."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()


def problems_of(page: Page, allowed: str) -> list[str]:
    """A list that grows by every error in the page's console and every request to elsewhere; those are refused."""
    problems: list[str] = []

    def refuse(route: Route) -> None:
        problems.append(f"request to {route.request.url}")
        route.abort()

    page.route(lambda url: not url.startswith((allowed, "data:", "blob:")), refuse)
    page.on("pageerror", lambda error: problems.append(f"error {error}"))
    page.on("console", lambda said: problems.append(f"console {said.text}") if said.type == "error" else None)
    return problems


def finite(value: Any) -> Any:
    """The value with None for what is no number, which JSON has no word for."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
