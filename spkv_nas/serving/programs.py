"""Name the engines that exports are checked with; imports nothing heavy, because the command line lists them."""

PROGRAMS = {"vllm": "run_vllm.py", "transformers": "run_transformers.py"}  # by engine, whose package has its name
