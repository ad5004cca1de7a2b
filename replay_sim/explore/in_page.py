"""What an explorer's box needs of the page that shows it: its width, and that keys on its controls stay there."""

from __future__ import annotations

import anywidget
import ipywidgets as widgets
import traitlets


class InPage(anywidget.AnyWidget):
    """An invisible child of an explorer's box.

    `width` is the box's in pixels, 0 until a page shows it. The box's controls hear their own keys, where JupyterLab
    would take an arrow on a menu for leaving the cell and the letter `b` for inserting one.
    """

    width = traitlets.Int(0).tag(sync=True)

    _esm = """
    export default {
        render({ model, el }) {
            let frame;
            const keep = (event) => { event.target.dataset.lmSuppressShortcuts = "true"; };
            const sized = new ResizeObserver(([{ target }]) => {
                const width = target.clientWidth;
                if (width === 0 || width === model.get("width")) return;
                model.set("width", width);
                model.save_changes();
            });
            const listen = () => {
                const box = el.closest(".widget-vbox");
                if (!box) {
                    frame = requestAnimationFrame(listen);
                    return;
                }
                box.addEventListener("focusin", keep);
                sized.observe(box);
            };
            listen();
            return () => {
                cancelAnimationFrame(frame);
                sized.disconnect();
            };
        },
    };
    """

    def __init__(self) -> None:
        super().__init__(layout=widgets.Layout(display="none"))
