"""One rank from its start to its exit code. The wing that imports torch.

The modules of this package are the loop and its surroundings: ``main`` is called by ``launchers.entry``,
``rank`` sets up and tears down, ``build`` assembles, ``loop`` calls ``step``. Below them, in the order in
which they may import:

- ``checkpoint``: asynchronous saves, loading, export
- ``tasks``, ``strategies``: losses; how ranks share a model
- ``models``, ``datasets``: the parts by name
- ``health``: node check, hang detection
- ``distributed``: process group, device, precision, consensus

They import ``loggers``, ``recovery``, ``run``, ``rank`` and ``experiment``, never a launcher or a command.
No module outside imports this wing except ``launchers.entry``, and ``api`` for ``load_model``. Start reading
at ``loop.py``.
"""
