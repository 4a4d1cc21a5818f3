"""What is trained on which cluster: small models, on links so slow that it matters how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.contenders import Case


@dataclass(frozen=True, slots=True)
class Scenario:
    """`nodes` of `per_node` ranks, joined by links of `mbit_per_s`, and the `model` (`workload`)
    that they train; `text` says in short what it is."""

    name: str
    nodes: int
    per_node: int
    mbit_per_s: int
    text: str
    stages: tuple[int, ...] = ()
    """The numbers of stages that are tried beside the choice."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def cluster(self) -> str:
        """Scenarios of equal text can share a profile."""
        return f"{self.nodes}x{self.per_node}, {self.mbit_per_s} Mbit"


SCENARIOS: Mapping[str, Scenario] = {
    each.name: each
    for each in (
        Scenario("wide-2", 2, 1, 1000, "GPT-2, 2 layers of 512, 256 tokens"),
        Scenario("deep-4", 4, 1, 1000, "GPT-2, 12 layers of 128, 512 tokens"),
        Scenario("balanced-4", 4, 1, 1000, "GPT-2, 4 layers of 256, 1,024 tokens"),
        Scenario("long-4", 2, 2, 500, "Llama, 2 layers of 128, 2 sequences of 512"),
        Scenario("vocabulary-4", 2, 2, 500, "GPT-2, 1 layer of 128, 16,384 words, 256 tokens"),
        Scenario("few-tokens-4", 2, 2, 100, "Llama, 2 layers of 512, 256 tokens", (2,)),
        Scenario("even-2", 2, 1, 100, "Llama, 4 layers of 256, 1,024 tokens", (2,)),
        Scenario("even-4", 2, 2, 100, "Llama, 4 layers of 256, 1,024 tokens", (2,)),
        Scenario("words-4", 2, 2, 100, "Llama, 2 layers of 256, 16,384 words, 512 tokens", (2,)),
        Scenario("convolutions-6", 3, 2, 500, "ResNet, 6 blocks of 32 to 128 channels, 24 images"),
        Scenario("deep-6", 6, 1, 1000, "Llama, 6 layers of 192, 384 tokens"),
        Scenario("experts-8", 2, 4, 500, "Mixtral, 2 layers of 8 experts, 256 tokens"),
        Scenario("wide-8", 2, 4, 500, "GPT-2, 2 layers of 512, 256 tokens"),
        Scenario("slow-4", 4, 1, 100, "GPT-2, 8 layers of 256, 1,024 tokens", (2, 4)),
        Scenario("uneven-2", 2, 1, 100, "Llama, 8 layers of 256, 16,384 words, 512 tokens", (2,)),
        Scenario("words-2", 2, 1, 100, "Llama, 8 layers of 256, 32,768 words, 1,024 tokens", (2,)),
        Scenario("uneven-4", 4, 1, 100, "Llama, 8 layers of 128, 8,192 words, 512 tokens", (2, 4)),
        Scenario("uneven-50", 4, 1, 50, "Llama, 8 layers of 128, 8,192 words, 512 tokens", (2, 4)),
        Scenario(
            "uneven-200", 4, 1, 200, "Llama, 8 layers of 128, 8,192 words, 512 tokens", (2, 4)
        ),
    )
}


def workload(name: str) -> Case:
    """What is trained in a scenario."""
    from functools import partial

    from benchmarks import contenders, models
    from benchmarks.contenders import Case

    def gpt2(batch: int, sequence: int, words: int = 1024, **sizes: int) -> Case:
        return Case(
            partial(models.gpt2_small, words=words, sequence=sequence, **sizes),
            partial(models.tokens, words, batch, sequence, "cpu"),
            contenders.given_loss,
            lambda model: model.transformer.h,
            contenders.gpt2_by_hand,
        )

    def llama(batch: int, sequence: int, words: int = 1024, **sizes: int) -> Case:
        return Case(
            partial(models.llama_small, words=words, sequence=sequence, **sizes),
            partial(models.tokens, words, batch, sequence, "cpu"),
            contenders.given_loss,
            lambda model: model.model.layers,
            contenders.llama_by_hand,
        )

    match name:
        case "wide-2" | "wide-8":
            return gpt2(8, 32, width=512, layers=2, heads=8)
        case "deep-4":
            return gpt2(8, 64, width=128, layers=12)
        case "balanced-4":
            return gpt2(8, 128)
        case "long-4":
            return llama(2, 512, width=128, inner=384, layers=2)
        case "vocabulary-4":
            return gpt2(8, 32, words=16_384, width=128, layers=1)
        case "few-tokens-4":
            return llama(8, 32, width=512, inner=1536, layers=2, heads=8)
        case "even-2" | "even-4":
            return llama(8, 128, layers=4)
        case "words-4":
            return llama(16, 32, words=16_384, layers=2)
        case "slow-4":
            return gpt2(16, 64, layers=8)
        case "uneven-4" | "uneven-50" | "uneven-200":
            return llama(16, 32, words=8192, width=128, inner=384, layers=8)
        case "uneven-2":
            return llama(16, 32, words=16_384, width=256, inner=768, layers=8)
        case "words-2":
            return llama(32, 32, words=32_768, width=256, inner=768, layers=8)
        case "convolutions-6":
            return Case(
                models.resnet_small,
                partial(models.images, 10, 24, 32),
                contenders.returned_loss,
                contenders.resnet_blocks,
                contenders.resnet_by_hand,
            )
        case "deep-6":
            return llama(12, 32, width=192, inner=480, layers=6, heads=12, words=960)
        case "experts-8":
            return Case(
                models.mixtral_small,
                partial(models.tokens, 1024, 8, 32, "cpu"),
                contenders.given_loss,
                lambda model: model.model.layers,
                contenders.mixtral_by_hand,
            )
        case _:
            raise ValueError(f"no scenario {name!r}")
