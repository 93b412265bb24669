"""The release map: what was read, what is told from neighbours, and what is refused."""

import pytest

from stalegraph.vllm import affected
from stalegraph.vllm.releases import MAP, builder_source_verdict, release_of, span

AFFECTED = ("0.15.0", "0.15.1", "0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.1")
FIXED = ("0.13.0", "0.14.0", "0.14.1", "0.19.0", "0.19.1", "0.20.0", "0.20.2", "0.23.0", "0.28.0", "0.33.0")
OUTSIDE = ("0.12.0", "0.33.1", "0.34.0", "1.0.0", "0.15.0rc1", "0.15.1.dev3+g1234", "dev", "")


@pytest.mark.parametrize("version", AFFECTED)
def test_affected_releases(version):
    assert release_of(version).affected is True


@pytest.mark.parametrize("version", FIXED)
def test_unaffected_releases(version):
    assert release_of(version).affected is False


@pytest.mark.parametrize("version", OUTSIDE)
def test_outside_of_the_map_nothing_is_claimed(version):
    assert release_of(version) is None


@pytest.mark.parametrize("version", ("0.18.2", "0.14.9"))
def test_between_releases_that_disagree_nothing_is_claimed(version):
    found = release_of(version)
    assert found.affected is None and not found.exact


def test_local_versions_and_posts_are_the_release():
    assert release_of("0.15.0+cu129").version == release_of("0.15.0.post1").version == "0.15.0"


def test_the_map_agrees_with_the_rule_that_the_hotfix_goes_by():
    for read in MAP:
        version = ".".join(map(str, read.version))
        assert release_of(version).affected == affected.by_version(version), version
        assert release_of(version).exact


@pytest.mark.parametrize(
    "version, torch, cuda",
    [("0.15.0", "2.9.1", 12), ("0.20.2", "2.11.0", 13), ("0.18.0", "2.10.0", 12), ("0.32.0", None, 13)],
)
def test_what_a_release_is_built_with(version, torch, cuda):
    found = release_of(version)
    assert (found.torch, found.cuda_major) == (torch, cuda)


@pytest.mark.parametrize("version, fill", [("0.15.0", -1), ("0.19.1", -1), ("0.20.0", 0), ("0.33.0", 0)])
def test_padded_rows(version, fill):
    found = release_of(version)
    assert found.padded_row_fill == fill and found.padding_is_safe == (fill == 0)


@pytest.mark.parametrize(
    "version, v2, v3", [("0.15.0", "v1", "v1"), ("0.23.0", "v1", "v1"), ("0.24.0", "v2", "v1"), ("0.29.0", "v2", "v2")]
)
def test_the_runner_by_default(version, v2, v3):
    found = release_of(version)
    assert found.runner("DeepseekV2ForCausalLM") == v2 and found.runner("DeepseekV3ForCausalLM") == v3


def builder(body: str, name: str = "FlashMLAMetadataBuilder") -> str:
    return (
        f"class {name}:\n    def __init__(self):\n        self.cg_buf_tile_scheduler_metadata = 1\n"
        f"    def _build_decode(self, seq_lens):\n        {body}\n        return 0\n"
    )


def test_the_verdict_on_a_builder_is_by_what_its_method_reads():
    assert builder_source_verdict(builder("self.cg_buf_tile_scheduler_metadata[:2].copy_(seq_lens)")) == "copies"
    assert builder_source_verdict(builder("pass")) == "affected"
    assert builder_source_verdict(builder("pass  # cg_buf_tile_scheduler_metadata")) == "affected"
    assert builder_source_verdict(builder("pass", "OtherBuilder")) == "unknown"
    assert builder_source_verdict("def broken(:") == "unknown"
    assert builder_source_verdict("") == "unknown"


def test_the_span_in_words():
    assert span() == "0.13.0 to 0.33.0"
