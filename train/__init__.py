"""Training of heads on a frozen target: `accelerate launch train/<kind>.py --config configs/<kind>/<target>.yaml`.

`config` and `command_line` say what a run is made of, `run` sets it up, `loop` trains, `evaluate` decodes held-out
prompts, `checkpoints` holds what survives a kill, `journal` what is shown and logged. No other package imports it.
"""
