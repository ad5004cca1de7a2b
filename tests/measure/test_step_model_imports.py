"""Planning on a laptop stays fast: the step-time model and the trim threshold load no torch."""

import subprocess
import sys

MODULES = (
    "roofline",
    "step_model",
    "step_costs",
    "step_fit",
    "step_report",
    "trim_curve",
    "trim_model",
    "repeats",
    "records",
)


def test_the_model_the_threshold_and_records_load_no_torch() -> None:
    imports = "; ".join(f"import replay_sim.measure.{name}" for name in MODULES)
    program = f"import sys; {imports}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert found == ["False", "True"]
