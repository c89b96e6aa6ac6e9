"""A plugin as a user writes one: an objective that learns from a teacher's most likely tokens, and a key of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ndtrain.config import ObjectiveConfig
from ndtrain.model.objective import Column, Objective
from ndtrain.model.vocabulary import Targets, Vocabulary
from ndtrain.plugins import register_objective


@dataclass
class DistillationConfig(ObjectiveConfig):
    alpha: float = 0.7  # of the teacher's cross-entropy; the labels' has the rest


@register_objective("distillation", DistillationConfig)
class Distillation(Objective):
    """alpha * sum over the teacher's tokens of p_teacher (-log p) + (1 - alpha) * cross-entropy of the label."""

    columns = (Column("teacher_ids", torch.int64, (3,)), Column("teacher_probs", torch.float32, (3,)))
    sums = ("teacher_loss",)

    def read(self, targets_C: Targets, vocabulary: Vocabulary) -> tuple[Tensor, ...]:
        label_C1, label_here_C1 = vocabulary.local(targets_C.labels[:, None])
        ids_CK, here_CK = vocabulary.local(targets_C.columns["teacher_ids"])
        probs_CK = targets_C.columns["teacher_probs"]
        total_C1 = probs_CK.sum(1, keepdim=True, dtype=torch.float64)
        if here_CK is None:
            return label_C1, torch.ones_like(label_C1, dtype=torch.bool), ids_CK, probs_CK, total_C1
        return label_C1, label_here_C1, ids_CK, probs_CK * here_CK, total_C1

    def losses(
        self, logits_CV: Tensor, lse_C: Tensor, weight_C1: Tensor, wanted: bool, *read: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        label_C1, label_here_C1, ids_CK, probs_CK, total_C1 = read
        alpha, wide_CV, lse_C1 = self.cfg.alpha, logits_CV.to(lse_C.dtype), lse_C[:, None]
        hit_C1, probs_CK = label_here_C1.to(wide_CV.dtype), probs_CK.to(wide_CV.dtype)
        label_loss = ((lse_C1 - wide_CV.gather(1, label_C1)) * hit_C1 * weight_C1).sum()
        teacher_loss = ((lse_C1 - wide_CV.gather(1, ids_CK)) * probs_CK * weight_C1).sum()
        sums = torch.stack([alpha * teacher_loss + (1 - alpha) * label_loss, teacher_loss])
        if not wanted:
            return sums, None
        dlogits_CV = (wide_CV - lse_C1).exp() * (alpha * total_C1 + 1 - alpha).to(wide_CV.dtype)
        dlogits_CV = dlogits_CV.scatter_add(1, ids_CK, -alpha * probs_CK)
        return sums, dlogits_CV.scatter_add(1, label_C1, (alpha - 1) * hit_C1).to(logits_CV.dtype)
