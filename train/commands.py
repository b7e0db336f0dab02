"""What a command runs. Imported after the arguments are known to be good: here JAX starts."""

from __future__ import annotations

from dflash_jax.compile_cache import keep_compiled
from dflash_jax.terminal import Screen
from train.parse import Request


def run(request: Request, screen: Screen) -> int:
    """Exit status."""
    keep_compiled()
    if request.command == "synthesize":
        from train import synthesize

        return synthesize.run(request.settings, screen)
    if request.command == "regenerate":
        from train import regenerate

        return regenerate.run(request.settings, screen)
    if request.command == "features":
        from train import features

        return features.run(request.settings, screen)
    if request.command == "fit":
        from train import loop

        return loop.run(request.settings, screen)
    if request.command == "evaluate":
        from train import evaluate

        return evaluate.run(request.settings, screen, request.draft, request.prompts, request.out)
    if request.command == "export":
        from train import export

        return export.run(request.settings, screen, request.draft, request.out)
    from train import language_model

    return language_model.run(request.settings, screen)
