"""The collectives: one file each, one contract (``base``); every module of this folder is imported and may register.

To add one, write a file with a ``CollectiveOp`` under ``@register``, and name it in ``types.Op`` so that routes may
name it.

May import: ``collectives.messages`` and ``collectives.data``.
"""
