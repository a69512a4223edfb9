"""Why an attempt ended, whether the run continues, and on which nodes: pure functions of a run's files. No
scheduler, no torch. Start reading at ``diagnosis.py``.
"""
