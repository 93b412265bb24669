"""Loads the one plugin under test, once a process."""

_loaded = False


def load_general_plugins():
    global _loaded
    if _loaded:
        return
    _loaded = True
    try:
        from stalegraph.vllm.hotfix import register
    except ImportError:  # a machine without stalegraph
        return
    register()
