"""The dense step: AdamW, warm-up and schedule, clipping by the global norm. Tables are updated elsewhere (lookup.py).

The learning rate of optimizer step s (0-based) is lr * factor(s):

    s < warmup_steps:   (s + 1) / warmup_steps
    "constant":         1
    "cosine":           floor + (1 - floor) * (1 + cos(pi * x)) / 2,   x = (s - warmup) / (total - warmup), at most 1

The same shape drives the tables' learning rate (`Tables.set_learning_rate`), from its own base value. The schedule is
a pure function of the step number: there is no scheduler state to save or to lose.

Clipping sees the dense gradients only, not those that enter the tables. Weight decay applies to matrices, not to biases
and norms (parameters with fewer than two dims).

AdamW is element by element, so it runs on this rank's own part of every parameter as a plain tensor: a cut parameter
(DTensor) would send each operation through DTensor's dispatch, which costs more host time than the update. On CUDA the
update is torch's fused one, a few launches for all parameters; elsewhere torch's plain one. They differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gem_pipelines.config import OptimizerConfig
from gem_pipelines.parallel_dense import Placement, WholeParameters, as_part_of, own_part

STATE_NAMES = ("exp_avg", "exp_avg_sq", "step")


class GradientError(ValueError):
    """The gradients are not finite numbers; the dense parameters were not updated."""


def learning_rate_factor(step: int, *, warmup_steps: int, total_steps: int, schedule: str, floor: float) -> float:
    """factor(step) of the module's docstring.

    >>> [learning_rate_factor(s, warmup_steps=2, total_steps=4, schedule="cosine", floor=0.0) for s in (0, 1, 2, 3)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule != "cosine":
        raise ValueError(f"optimizer.schedule is {schedule!r}; valid: 'constant', 'cosine'")
    share = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * share))


class DenseOptimizer:
    """AdamW over the named parameters of the dense model.

    named_parameters  (canonical name, parameter) of this rank; names key the checkpoint
    total_steps       length of the schedule
    placement         where the other parts of the parameters are; None: every rank has them whole
    fused             torch's fused update; None: on CUDA
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        *,
        total_steps: int,
        placement: Placement | None = None,
        fused: bool | None = None,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.named = dict(named_parameters)
        self.placement = placement or WholeParameters(self.named.items())
        self._own = {name: nn.Parameter(own_part(parameter)) for name, parameter in self.named.items()}
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, parameter in self.named.items():
            groups[parameter.ndim < 2].append(self._own[name])
        self.fused = any(own.is_cuda for own in self._own.values()) if fused is None else fused
        self.adamw = torch.optim.AdamW(
            [
                {"params": parameters, "weight_decay": 0.0 if plain else config.weight_decay}
                for plain, parameters in groups.items()
                if parameters
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True if self.fused else None,
        )

    def factor(self, step: int) -> float:
        """Learning rate factor of 0-based `step`."""
        config = self.config
        return learning_rate_factor(
            step,
            warmup_steps=config.warmup_steps,
            total_steps=self.total_steps,
            schedule=config.schedule,
            floor=config.floor,
        )

    def clip(self) -> Tensor:
        """Clip the gradients; returns their norm before, over all ranks, on the device. Changes gradients only."""
        limit = self.config.max_grad_norm
        return self.placement.clip(self.named.values(), math.inf if limit is None else limit)

    def clear(self) -> None:
        """Drop the gradients."""
        for name, parameter in self.named.items():
            parameter.grad = self._own[name].grad = None

    def step(self, step: int) -> tuple[float, float]:
        """Clip and update; returns (learning rate used, gradient norm before clipping). Gradients are cleared.

        Raises GradientError, with dense parameters and their state as they were, where the norm is not finite; it is
        the norm over all ranks, so all raise.
        """
        found = float(self.clip())
        if not math.isfinite(found):
            self.clear()
            raise GradientError(
                f"step {step + 1}: the norm of the dense gradients is {found}; nothing was changed. Lower optimizer.lr "
                "or tables.lr, or clip (optimizer.max_grad_norm)."
            )
        return self.update(step), found

    def update(self, step: int, *, skipped: Tensor | None = None) -> float:
        """Update with the gradients as they are, and clear them; returns the learning rate used.

        skipped: a bool on the device; where it is true nothing changes, and the host need not know. Fused only.
        """
        assert skipped is None or self.fused, "only torch's fused update can be left out on the device"
        lr = self.config.lr * self.factor(step)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.found_inf = None if skipped is None else skipped.float()  # type: ignore[attr-defined]
        self._take_gradients()
        self.adamw.step()
        self.clear()
        return lr

    def _take_gradients(self) -> None:
        """This rank's parts of parameters and gradients, as they are now: FSDP2 may have moved a part since."""
        with torch.no_grad():
            for name, parameter in self.named.items():
                own, part = self._own[name], own_part(parameter)
                if own.data_ptr() != part.data_ptr():
                    own.data = part
                own.grad = None if parameter.grad is None else own_part(parameter.grad)

    def state_tensors(self) -> dict[str, Tensor]:
        """ "<parameter>.<state>" -> whole tensor, for parameters that were updated at least once. A collective where
        parameters are cut.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in self.named.items():
            for key, value in self.own_state(name).items():
                found[f"{name}.{key}"] = value if key == "step" else as_part_of(value, parameter)
        return self.placement.gather(found, {key: key.rsplit(".", 1)[0] for key in self.expected_shapes()})

    def own_state(self, name: str) -> dict[str, Tensor]:
        """State -> this rank's part of it, of one parameter; empty before its first update."""
        state = self.adamw.state.get(self._own[name], {})
        return {key: state[key] for key in STATE_NAMES if key in state}

    def hyperparameters(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the tensors."""
        config = self.config
        return {
            "kind": "AdamW",
            "lr": config.lr,
            "betas": list(config.betas),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "max_grad_norm": config.max_grad_norm,
            "schedule": {
                "kind": config.schedule,
                "warmup_steps": config.warmup_steps,
                "floor": config.floor,
                "total_steps": self.total_steps,
            },
        }

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """ "<parameter>.<state>" -> shape, of every state tensor that can exist."""
        return {
            f"{name}.{key}": () if key == "step" else shape
            for name, shape in self.placement.shapes.items()
            for key in STATE_NAMES
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state_tensors`; the caller has checked names and shapes."""
        self.adamw.state.clear()
        for name, parameter in self.named.items():
            present = {key: tensors[f"{name}.{key}"] for key in STATE_NAMES if f"{name}.{key}" in tensors}
            if not present:
                continue
            assert len(present) == len(STATE_NAMES), f"half a state for {name}: {sorted(present)}"
            # `step` is on the CPU, or beside the parameter where the update is fused; the moments follow the parameter.
            own = self._own[name]
            self.adamw.state[own] = {
                key: value.to(own.device if self.fused else "cpu", copy=True)
                if key == "step"
                else own_part(self.placement.cut(value, parameter))
                for key, value in present.items()
            }
