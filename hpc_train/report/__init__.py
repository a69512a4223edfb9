"""Reports on runs, during and after training: metrics, progress, tables of runs, the page of ``report``
(``html``) and the screen of ``watch`` (``live``). Reads run folders; imports no launcher and no torch. Start
reading at ``metrics_reader.py``.
"""
