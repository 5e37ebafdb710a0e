"""Plug-in for vLLM, which serves exports of the model type ``spkv`` with their layout.

vLLM finds it by its entry point once spkv-nas is installed in the same environment, so that ``vllm serve FOLDER``
needs no option. Each ``Attention`` of vLLM's model is replaced by several, whose heads have one window (``config.py``,
``attention.py``); vLLM's cache manager then frees what lies outside the windows.

Inside vLLM only the modules of this package and the few that they name are imported: no pandas, typer or Trainer.
"""
