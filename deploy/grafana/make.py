"""Makes the dashboards beside it: ``python deploy/grafana/make.py`` (``pip install grafana-foundation-sdk``)."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueTextMode, LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

HERE = Path(__file__).parent
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
RUN = 'run="$run"'
WIDE, HALF, THIRD, QUARTER = 24, 12, 8, 6

Query = tuple[str, str]  # PromQL and legend


def query(expression: str, legend: str, *, as_table: bool = False) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(expression).legend_format(legend).datasource(SOURCE)
    return made.instant().format(PromQueryFormat.TABLE) if as_table else made.range()


def lines(title: str, about: str, unit: str, span: int, *queries: Query) -> timeseries.Panel:
    """Figures over time."""
    panel = (
        timeseries.Panel().title(title).description(about).unit(unit).span(span).height(8).datasource(SOURCE)
    )
    legends = common.VizLegendOptions().show_legend(True)
    panel.legend(legends.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
    for number, (expression, legend) in enumerate(queries):
        panel.with_target(query(expression, legend).ref_id(chr(ord("A") + number)))
    return panel


def figure(title: str, about: str, unit: str, span: int, expression: str, legend: str = "") -> stat.Panel:
    """One figure, large."""
    panel = stat.Panel().title(title).description(about).unit(unit).span(span).height(4).datasource(SOURCE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.text_mode(BigValueTextMode.NAME if legend else BigValueTextMode.VALUE)
    return panel.with_target(query(expression, legend).ref_id("A"))


def rows(title: str, about: str, span: int, hidden: tuple[str, ...], *queries: Query) -> table.Panel:
    """A table: the labels of the first query, and a column named by the legend for each one."""
    panel = (
        table.Panel()
        .title(title)
        .description(about)
        .span(span)
        .height(8)
        .datasource(SOURCE)
        .show_header(True)
    )
    names: dict[str, str] = {}
    for number, (expression, legend) in enumerate(queries):
        letter = chr(ord("A") + number)
        panel.with_target(query(expression, legend, as_table=True).ref_id(letter))
        names["Value" if len(queries) == 1 else f"Value #{letter}"] = legend
    left_out = dict.fromkeys(("Time", "__name__", "instance", "job", *hidden), True)
    merge = DataTransformerConfig(id_val="merge", options={})
    shown = {"excludeByName": left_out, "renameByName": names}
    return panel.transformations([merge, DataTransformerConfig(id_val="organize", options=shown)])


def states(title: str, about: str, expression: str, legend: str) -> statetimeline.Panel:
    """What was so when, as bars."""
    panel = statetimeline.Panel().title(title).description(about).span(WIDE).height(6).datasource(SOURCE)
    panel.merge_values(True)
    return panel.with_target(query(expression, legend).ref_id("A"))


def board(uid: str, title: str, about: str) -> dashboard.Dashboard:
    source = dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus")
    made = dashboard.Dashboard(title).uid(uid).description(about).tags(["keepstep"]).refresh("5s").readonly()
    return (
        made.time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(source)
    )


def variable(name: str, values: str, *, many: bool) -> dashboard.QueryVariable:
    made = dashboard.QueryVariable(name).query(values).datasource(SOURCE).multi(many).include_all(many)
    made.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    return made.all_value(".*") if many else made


def fleet() -> dashboard.Dashboard:
    """All runs."""
    made = board("keepstep-fleet", "keepstep: all runs", "Which of the runs needs somebody now.")
    for panel in (
        figure("Runs", "Runs that are served.", "none", QUARTER, "count(keepstep_job_step)"),
        figure(
            "Training",
            "Runs that make steps.",
            "none",
            QUARTER,
            'sum(keepstep_job_state{state="running"})',
        ),
        figure("Open incidents", "Over all runs.", "none", QUARTER, "sum(keepstep_incidents_open)"),
        figure(
            "Rank hours lost, last hour",
            "Time that incidents have cost, times the ranks that waited.",
            "h",
            QUARTER,
            "sum(keepstep:lost_ratio_1h * on (run, instance, job) keepstep_job_ranks)",
        ),
        rows(
            "Runs",
            "One line for each run; slowdown: duration of a step over its healthy one; lost: seconds in all.",
            WIDE,
            (),
            ("max by (run, state) (keepstep_job_state == 1)", "is so"),
            ("max by (run) (keepstep_job_step)", "step"),
            ("max by (run) (keepstep_iteration_seconds)", "s per step"),
            ("max by (run) (keepstep_slowdown_ratio)", "slowdown"),
            ("sum by (run) (keepstep_incidents_open)", "open incidents"),
            ("sum by (run) (keepstep_lost_seconds_total)", "lost s"),
            ("max by (run) (keepstep_loss_now_steps)", "loss now, steps"),
            ("max by (run) (keepstep_restarts_total)", "restarts"),
        ),
        rows(
            "Incidents, open and newest",
            "Who is to blame, as far as it is known.",
            WIDE,
            ("Value",),
            ("keepstep_incident_info", "known"),
        ),
        lines(
            "Slowdown",
            "1 is healthy.",
            "none",
            HALF,
            ("max by (run) (keepstep_slowdown_ratio)", "{{run}}"),
        ),
        lines(
            "Share of the last hour lost",
            "Slow steps, time without progress, recovery.",
            "percentunit",
            HALF,
            ("max by (run) (keepstep:lost_ratio_1h)", "{{run}}"),
        ),
        lines(
            "Training that would be lost now",
            "If the worst placed node died.",
            "s",
            HALF,
            ("max by (run) (keepstep:loss_now_seconds)", "{{run}}"),
        ),
        lines(
            "Age of what is known",
            "0 while news comes.",
            "s",
            HALF,
            ("max by (run) (keepstep_snapshot_age_seconds)", "{{run}}"),
        ),
    ):
        made.with_panel(panel)
    return made


def run() -> dashboard.Dashboard:
    """One run."""
    made = board("keepstep-run", "keepstep: a run", "What is wrong with a run, who it is, and what it costs.")
    made.with_variable(variable("run", "label_values(keepstep_job_step, run)", many=False))
    for panel in (*_now(), *_pace(), *_ranks(), *_durability(), *_hosts()):
        made.with_panel(panel)
    return made


def _now() -> tuple[stat.Panel | table.Panel | statetimeline.Panel, ...]:
    return (
        figure("State", "", "none", QUARTER, f"keepstep_job_state{{{RUN}}} == 1", "{{state}}"),
        figure("Step", "Newest step.", "none", QUARTER, f"max(keepstep_job_step{{{RUN}}})"),
        figure("Slowdown", "1 is healthy.", "none", QUARTER, f"max(keepstep_slowdown_ratio{{{RUN}}})"),
        figure("Open incidents", "", "none", QUARTER, f"sum(keepstep_incidents_open{{{RUN}}})"),
        rows(
            "Incidents, open and newest",
            "Who is to blame: the first culprit of each. The whole verdict: keepstep report RUN NUMBER.",
            WIDE,
            ("run", "Value"),
            (f"keepstep_incident_info{{{RUN}}}", "known"),
        ),
        states("State of the job", "", f"keepstep_job_state{{{RUN}}} == 1", "{{state}}"),
    )


def _pace() -> tuple[timeseries.Panel, ...]:
    return (
        lines(
            "Duration of a step",
            "Now, and before the oldest open slowdown.",
            "s",
            HALF,
            (f"keepstep_iteration_seconds{{{RUN}}}", "now"),
            (f"keepstep_iteration_healthy_seconds{{{RUN}}}", "healthy"),
        ),
        lines(
            "Lost and saved",
            "Seconds of the job, in all.",
            "s",
            HALF,
            (f"keepstep_lost_seconds_total{{{RUN}}} > 0", "lost: {{kind}}"),
            (f"keepstep_saved_seconds_total{{{RUN}}}", "saved"),
        ),
        lines(
            "Incidents so far",
            "By kind.",
            "none",
            HALF,
            (f"keepstep_incidents_total{{{RUN}}}", "{{kind}}"),
        ),
        lines(
            "Recoveries",
            "Median of all, the newest one, and its parts.",
            "s",
            HALF,
            (f"histogram_quantile(0.5, sum by (le) (keepstep_recovery_seconds_bucket{{{RUN}}}))", "median"),
            (f"keepstep_recovery_last_seconds{{{RUN}}}", "newest"),
            (f"keepstep_recovery_last_phase_seconds{{{RUN}}}", "{{phase}}"),
        ),
    )


def _ranks() -> tuple[timeseries.Panel | table.Panel, ...]:
    return (
        lines(
            "Own time of the ranks",
            "Time in which a rank waits for nobody: percentiles over all ranks.",
            "s",
            THIRD,
            (f"keepstep_ranks_own_seconds{{{RUN}}}", "{{percentile}} %"),
        ),
        lines(
            "Steps behind the newest",
            "Percentiles over all ranks.",
            "none",
            THIRD,
            (f"keepstep_ranks_lag_steps{{{RUN}}}", "{{percentile}} %"),
        ),
        lines(
            "Time since the last progress",
            "Percentiles over all ranks.",
            "s",
            THIRD,
            (f"keepstep_ranks_idle_seconds{{{RUN}}}", "{{percentile}} %"),
        ),
        rows(
            "Worst ranks",
            "Own time over the median of the peers; steps behind.",
            HALF,
            ("run",),
            (f"topk(10, keepstep_rank_own_ratio{{{RUN}}})", "own time, ×"),
            (
                f"keepstep_rank_lag_steps{{{RUN}}} and on (run, rank) topk(10, keepstep_rank_own_ratio{{{RUN}}})",
                "steps behind",
            ),
        ),
        lines(
            "Ranks that need a look",
            "Dead, unwatched, or waiting longer than usual.",
            "none",
            HALF,
            (f'keepstep_ranks{{{RUN}, condition!="heard"}}', "{{condition}}"),
        ),
    )


def _durability() -> tuple[timeseries.Panel, ...]:
    return (
        lines(
            "Newest step that every node has",
            "In its memory, in another node's, on storage.",
            "none",
            HALF,
            (f"keepstep_job_step{{{RUN}}}", "trained"),
            (f"keepstep_checkpoint_step{{{RUN}}}", "{{kept}}"),
        ),
        lines(
            "Training that would be lost now",
            "If the worst placed node died.",
            "s",
            HALF,
            (f"keepstep:loss_now_seconds{{{RUN}}}", "loss now"),
        ),
    )


def _hosts() -> tuple[timeseries.Panel | table.Panel, ...]:
    return (
        lines(
            "Nodes",
            "By how their agent is, and spares.",
            "none",
            THIRD,
            (f'keepstep_nodes{{{RUN}, part="agent"}}', "{{state}}"),
            (f"keepstep_spares{{{RUN}}}", "spares"),
        ),
        lines(
            "Slowest link",
            "Rate over the usual rate.",
            "percentunit",
            THIRD,
            (f"keepstep_links_worst_ratio{{{RUN}}}", "slowest"),
        ),
        rows(
            "Slow links and silent nodes",
            "Rate over the usual rate; seconds since a node was heard.",
            THIRD,
            ("run",),
            (f"keepstep_link_rate_ratio{{{RUN}}}", "rate, ×"),
            (f"keepstep_node_silent_seconds{{{RUN}}}", "silent, s"),
        ),
        lines(
            "GPUs of the worst ranks: temperature",
            "From dcgm-exporter, by node and GPU.",
            "celsius",
            HALF,
            (
                f"topk(10, keepstep:rank_gpu_temperature_celsius{{{RUN}}})",
                "rank {{rank}}, {{node}} GPU {{gpu}}",
            ),
        ),
        lines(
            "GPUs of the worst ranks: clock",
            "From dcgm-exporter: the lowest ones.",
            "hertz",
            HALF,
            (
                f"bottomk(10, keepstep:rank_gpu_sm_clock_hertz{{{RUN}}})",
                "rank {{rank}}, {{node}} GPU {{gpu}}",
            ),
        ),
    )


BOARDS = {"keepstep-fleet.json": fleet, "keepstep-run.json": run}


def made() -> dict[str, str]:
    """The dashboards as JSON, by the names of their files."""
    return {
        name: JSONEncoder(sort_keys=True, indent=2).encode(one().build()) + "\n"
        for name, one in BOARDS.items()
    }


if __name__ == "__main__":
    for name, content in made().items():
        (HERE / name).write_text(content)
