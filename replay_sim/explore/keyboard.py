"""What keeps an explorer's keys with its controls: JupyterLab would take arrows and letters for commands of its own."""

from __future__ import annotations

import anywidget
import ipywidgets as widgets


class KeysStay(anywidget.AnyWidget):
    """An invisible child of an explorer's box, for whose focused controls JupyterLab then has no shortcuts.

    Without it an arrow on a menu leaves the cell, and a letter such as `b` inserts one.
    """

    _esm = """
    export default {
        render({ el }) {
            let frame;
            const keep = (event) => { event.target.dataset.lmSuppressShortcuts = "true"; };
            const listen = () => {
                const box = el.closest(".widget-vbox");
                if (box) box.addEventListener("focusin", keep);
                else frame = requestAnimationFrame(listen);
            };
            listen();
            return () => cancelAnimationFrame(frame);
        },
    };
    """

    def __init__(self) -> None:
        super().__init__(layout=widgets.Layout(display="none"))
