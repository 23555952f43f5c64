"""The report: verdict first, everything that a reader needs, and nothing of what models and data sets say taken as markup."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from kivi.measure.results import Timing
from tasks.config import NightlyConfig, Thresholds
from tasks.judge.gate import judge, standing
from tasks.report.figures import cell_figure, depth_figure, pareto_figure, step_figure
from tasks.report.night import build_report
from tasks.report.table import columns, rows, show_ratio, show_seconds
from tasks.run.plan import Skipped
from tasks.run.result_files import StoreError

CONFIG = NightlyConfig(specs=("full",))
HOSTILE = (
    '</pre><script>alert("x")</script><img src=x onerror=alert(1)> {{ 7*7 }} '
    "\x1b[2J\x07 \u202eevil | `code` [a](javascript:alert(1)) $x$"
)


class Page(HTMLParser):
    """Collects the elements and the text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def make_report(night, config=CONFIG, **options):
    return build_report(night, judge(night, config), **options)


def test_the_verdict_comes_first_with_its_reasons(make_result, make_night):
    report = make_report(make_night(make_result("full"), make_result(kl_mean=0.5)))
    for text in (Page(report.html).text, report.markdown.replace("\\", "")):
        verdict, reason = text.index("failed: 1 of"), text.index("quality.kl_mean is 0.5 nats, above the limit of 0.01 nats")
        assert verdict < reason < text.index("KL, nats")


def test_every_cell_is_in_the_table_also_the_failed_one(make_result, make_night):
    night = make_night(make_result("full"), make_result(), "the kernel did not compile")
    page = Page(make_report(night).html).text
    assert page.count("failed: the kernel did not compile") == 1
    assert [row.gate for row in rows(night, judge(night, CONFIG))] == ["pass", "pass", "failed"]


def test_the_row_of_a_cell_reads_as_measured(make_result, make_night):
    night = make_night(make_result())
    (row,) = rows(night, judge(night, CONFIG))
    assert row._asdict() == {
        "cache": "kivi-roundtrip:k4v4",  # without the backend, which all cells share
        "layers": "–",
        "bytes_4096": "640",
        "bytes_32768": "–",
        "smaller": "3.12×",
        "kl": "0.0027",
        "interval": "0.0024 to 0.003",
        "flips": "2.4%",
        "perplexity": "21.5",
        "tier": "marginal: flips",
        "answers": "–",
        "decode": "0.90×",
        "speed": "4",
        "gate": "pass",
        "on": "embedded × humaneval",
    }


def test_layers_that_keep_their_own_cache_are_in_the_table_and_in_the_report(make_result, make_night):
    result = make_result()
    kept = {"layers_quantized": 2, "layers_kept": dict.fromkeys("0245", "RotatingKVCache")}
    night = make_night(result.model_copy(update={"provenance": result.provenance.model_copy(update=kept)}), make_result("full"))
    lines = rows(night, judge(night, CONFIG))
    assert "layers" in columns(lines)
    assert [line.layers for line in lines] == ["–", "2 of 6"]
    report = make_report(night)
    for text in (Page(report.html).text, report.markdown.replace("\\", "")):
        assert "2 of 6" in text and "RotatingKVCache: 0, 2, 4, 5; 2 are quantised" in text
    plain = make_night(result)
    assert "layers" not in columns(rows(plain, judge(plain, CONFIG)))


def test_a_result_from_before_bytes_were_counted_is_shown_without_them(make_result, make_night):
    result = make_result()
    old = result.model_copy(update={"memory": result.memory.model_copy(update={"bytes_per_token_4096": None})})
    night = make_night(old)
    (row,) = rows(night, judge(night, CONFIG))
    assert (row.bytes_4096, row.smaller, row.kl) == ("–", "–", "0.0027")
    assert "bytes_4096" not in columns([row])


def test_rows_show_the_trade_by_family_from_most_bytes_to_least(make_result, make_night):
    sizes = {"kivi:bits=2": 5.0, "mlx-quantized:bits=8": 9.0, "kivi:bits=8": 8.0, "full": 16.0, "mlx-quantized:bits=4": 6.0}
    results = [make_result(spec) for spec in sizes]
    weighed = [
        result.model_copy(update={"memory": result.memory.model_copy(update={"bytes_per_token_4096": size})})
        for result, size in zip(results, sizes.values(), strict=True)
    ]
    night = make_night(*weighed)
    assert [row.cache for row in rows(night, judge(night, CONFIG))] == [
        "full", "mlx-quantized:k8v8", "mlx-quantized:k4v4", "kivi:k8v8", "kivi:k2v2",
    ]  # fmt: skip


def test_what_all_rows_share_is_left_out(make_result, make_night):
    night = make_night(make_result(), make_result("kivi-roundtrip:bits=2,backend=mlx"))
    passed = rows(night, judge(night, CONFIG))
    assert {"gate", "on", "answers"}.isdisjoint(columns(passed))
    assert "gate" in columns([passed[0], passed[1]._replace(gate="fail")])
    assert "gate" in columns([passed[0]._replace(gate="fail")])
    several = make_night(make_result(), make_result("kivi-roundtrip:bits=2,backend=cuda"))
    assert [row.cache for row in rows(several, judge(several, CONFIG))] == [
        "kivi-roundtrip:k4v4,mlx", "kivi-roundtrip:k2v2,cuda",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rounds", "shown"),
    [([0.99, 1.04, 1.06], "≈ 1"), ([0.95, 0.96, 1.01], "≈ 1"), ([1.02, 1.04, 1.06], "1.04×"), ([0.8, 0.9, 1.1], "0.90×")],
)
def test_a_ratio_that_says_nothing_is_about_1(rounds, shown):
    assert show_ratio(Timing.of(rounds), 0.05) == shown


def test_the_noise_of_floats_has_no_digits(make_result, make_night):
    night = make_night(make_result(kl_mean=8.6e-12))
    assert rows(night, judge(night, CONFIG))[0].kl == "<1e-06"


@pytest.mark.parametrize(
    ("kl_mean", "expected"), [(0.0001, "marginal"), (0.009, "marginal"), (0.05, "marginal"), (0.11, "bad")], ids=str
)
def test_the_tier_is_the_worst_of_three(make_result, kl_mean, expected):
    bounds = CONFIG.thresholds_for("full").tiers
    assert standing(make_result(kl_mean=kl_mean).quality, bounds).tier == expected  # its flips, 2.4 %, are marginal
    assert standing(make_result("full").quality, bounds).tier == "good"


def test_a_spec_may_have_tiers_of_its_own_and_the_report_says_which(make_result, make_night):
    own = {"kivi*": Thresholds(tiers={"flip_rate": (0.03, 0.2)}), "*-k2v2-*": Thresholds(tiers={"kl_mean": (0.1, 0.2)})}
    night = make_night(make_result(), make_result("kivi-roundtrip:bits=2,backend=mlx", kl_mean=0.09))
    plain, strict = make_report(night), make_report(night, CONFIG.model_copy(update={"thresholds": own}))
    assert [row.tier for row in rows(night, judge(night, CONFIG))] == ["marginal: flips", "marginal: KL"]
    assert [row.tier for row in rows(night, judge(night, CONFIG.model_copy(update={"thresholds": own})))] == [
        "good",
        "marginal: KL p99",
    ]
    assert "up to: kl_mean 0.01 and 0.1; kl_p99 0.1 and 1; flip_rate 0.01 and 0.05." in Page(plain.html).text
    for text in (Page(strict.html).text, strict.markdown.replace("\\", "")):
        assert "for kivi-roundtrip-k4v4-g32-r128-mlx: kl_mean 0.01 and 0.1; kl_p99 0.1 and 1; flip_rate 0.03 and 0.2" in text
        assert "for kivi-roundtrip-k2v2-g32-r128-mlx: kl_mean 0.1 and 0.2; kl_p99 0.1 and 1; flip_rate 0.03 and 0.2" in text


def test_answers_are_shown_where_questions_were_asked(make_result, make_night):
    asked = make_night(make_result("full"), make_result(accuracy=0.5))
    report, silent = make_report(asked), make_report(make_night(make_result()))
    assert [row.answers for row in rows(asked, judge(asked, CONFIG))] == ["–", "50%, full 75%"]
    for text in (Page(report.html).text, report.markdown.replace("\\", "")):
        assert "answers: how right they are" in text
        assert "Answers, by length and depth" in text
    assert "50 %, full cache 75 %, of 2 questions" in Page(report.html).text
    assert "up to 512 tokens, depth 0.25: 50 %, full 75 %; up to 1024" in report.markdown.replace("\\", "")
    assert "answers" not in silent.markdown.lower() and "answers" not in Page(silent.html).text.lower()


def test_what_was_skipped_covered_and_used_is_said(make_result, make_night):
    night = make_night(
        make_result(), skipped=(Skipped(what="kivi-k2v2-g32-r128-metal", why="backend metal: no GPU"),), seconds={"score": 61.0}
    )
    report = make_report(night, experiment_id="1", parent_id="p", cell_ids=["c"])
    for text in (Page(report.html).text, report.markdown.replace("\\", "")):
        for part in (
            "kivi-k2v2-g32-r128-metal: backend metal: no GPU",
            "800 of 1,024 scored tokens see a quantised key",
            "1 min 01 s in all",
            "ab" * 32,
            "x86-64 processor, 2 cores",
            "OpenBLAS",
            "mlx 0.32.4",
            "0123abc",
        ):
            assert part in text, part


def test_the_kernels_share_of_the_error_is_said_and_what_did_not_run(make_result, make_night):
    result = make_result()
    quality = result.quality.model_copy(update={"control_kl_mean": 0.0035, "kernel_kl_mean": 4.2e-6})
    night = make_night(make_result("full"), result.model_copy(update={"quality": quality}))
    report = make_report(night)
    for text in (Page(report.html).text, report.markdown.replace("\\", "")):
        assert "the quantiser's KL is 0.0035 nats, attention on codes is 4.2e-06 nats from it" in text
        assert text.count("the quantiser's KL is") == 1
        assert "metal: not run in this night" in text
        assert "mlx: not run" not in text


def test_links_go_to_the_runs(make_result, make_night):
    report = make_report(make_night(make_result()), experiment_id="1", parent_id="p", cell_ids=["c", "d"])
    links = [attributes["href"] for tag, attributes in Page(report.html).tags if tag == "a"]
    assert links == [
        "http://127.0.0.1:5050/#/experiments/1/runs/p",
        "http://127.0.0.1:5050/#/compare-runs?runs=%5B%22c%22%2C%20%22d%22%5D&experiments=%5B%221%22%5D",
    ]
    assert "](#/experiments/1/runs/p)" in report.note


def test_what_models_and_data_sets_say_is_text(make_result, make_night):
    result = make_result(text=HOSTILE, model=HOSTILE, prompt_set=HOSTILE, accuracy=1.0)
    report = make_report(make_night(result, HOSTILE, name=HOSTILE[:90]))
    page = Page(report.html)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe"}
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
    assert not [link for _, link in page.tags if str(link.get("href", "")).startswith("javascript")]
    assert "alert(" in page.text
    assert "{{ 7*7 }}" in page.text
    for text in (report.html, report.markdown):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "<script" not in report.markdown
    assert "<img" not in report.markdown
    assert "](javascript" not in report.markdown
    assert "/" not in report.name


def test_the_page_needs_nothing_from_elsewhere(make_result, make_night):
    page = Page(make_report(make_night(make_result())).html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"}
    assert any(attributes.get("name") == "viewport" for _, attributes in page.tags)
    assert sum(tag == "svg" for tag, _ in page.tags) == 3


def test_each_model_and_prompt_set_has_its_own_figures(make_result, make_night):
    report = make_report(make_night(make_result(), make_result(prompt_set="retrieval")))
    assert len(report.figures) == 6


@pytest.mark.parametrize("draw", [pareto_figure, step_figure, depth_figure], ids=lambda draw: draw.__name__)
def test_figures_are_well_formed_and_the_same_each_time(make_result, draw):
    results = [make_result("full"), make_result()]
    figure = draw(results)
    root = ElementTree.fromstring(figure)  # noqa: S314  our own
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "kivi-roundtrip:k4v4" in figure
    assert "currentColor" in figure
    assert "mathdefault" not in figure  # ticks are plain numbers, not formulas that nobody typesets
    assert draw(results) == figure


def test_a_figure_of_one_cell_is_well_formed(make_result):
    ElementTree.fromstring(cell_figure(make_result()))  # noqa: S314  our own


def test_writing_leaves_both_forms_and_no_draft(tmp_path, make_result, make_night):
    report = make_report(make_night(make_result()))
    page = report.write(tmp_path / "reports")
    assert page.read_text(encoding="utf-8") == report.html
    assert sorted(path.suffix for path in page.parent.iterdir()) == [".html", ".md"]


def test_reports_that_cannot_be_written_are_one_sentence(tmp_path, make_result, make_night):
    (tmp_path / "reports").write_text("")
    with pytest.raises(StoreError, match="reports cannot be written: File exists; mend it and run again"):
        make_report(make_night(make_result())).write(tmp_path / "reports")


def test_numbers_are_shown_short():
    assert [show_seconds(seconds) for seconds in (0.04, 59.94, 59.96, 125, 3720)] == [
        "0.0 s", "59.9 s", "1 min 00 s", "2 min 05 s", "1 h 02 min",
    ]  # fmt: skip
