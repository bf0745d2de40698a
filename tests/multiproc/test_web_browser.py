"""The controller's page in a real browser, in every state that operators have to understand."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from starlette.responses import HTMLResponse

from tests.standins.processes import free_port
from tests.unit.control import statuses
from tests.unit.control.statuses import ERROR, HOSTILE, StatusServer, status, sync
from weightsync.net.server import Api, ServerThread
from weightsync.types.control import SPANS, ControllerStatus, SyncSpan

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP evil.example 127.0.0.1",
)  # fmt: skip
TOKEN = "a-token-for-tests-only"
WAIT_MS = 10_000

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None,
        reason="playwright is not installed: pip install weightsync[dev]",
    ),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield made
        made.close()


class Tab:
    """A page, and what it asked for and complained of."""

    def __init__(self, browser: Browser, *, width: int = 1280, dark: bool = False) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on(
            "console", lambda message: self.complaints.append(message.text) if message.type == "error" else None
        )

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def open(self, server: StatusServer) -> None:
        self.page.goto(server.url)
        self.page.wait_for_selector("#main:not([hidden])")

    def headline(self) -> str:
        return f"{self.text('#level')}: {self.text('#headline')} ({self.text('#detail')})"

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def rows(self, table: str) -> list[list[str]]:
        """Texts of a table's cells, as they are in the document."""
        return self.page.eval_on_selector_all(  # type: ignore[no-any-return]
            f"#{table} tbody tr", "rows => rows.map(row => Array.from(row.cells, cell => cell.textContent))"
        )

    def says(self, selector: str, words: str | re.Pattern[str]) -> None:
        """Waits until the page says it."""
        from playwright.sync_api import expect

        expect(self.page.locator(selector)).to_have_text(words, timeout=WAIT_MS)


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Tab]:
    with Tab(browser) as made:
        yield made


@pytest.mark.parametrize(
    ("now", "headline", "rest"),
    [
        (statuses.nothing_yet(), "OK: No sync yet ()", []),
        (status(), "OK: All 3 instances serve actor 12, verifier 12 ()", []),
        (
            statuses.evicted(),
            "LOOK: 1 of 3 instances is evicted: inst-2 (heartbeat late 12.3 s)",
            ["2 of 3 serve actor 12, verifier 12"],
        ),
        (
            statuses.failed(),
            f"LOOK: actor: the sync of version 13 failed 2 times, rollout waits (next try in 2.0 s: {ERROR})",
            ["All 3 instances serve actor 12, verifier 12"],
        ),
        (
            statuses.waiting(),
            "BUSY: Waiting for verifier to publish 13 (4.0 s of 60 s)",
            ["Syncing actor to version 13 (4.0 s so far)", "All 3 instances serve actor 12, verifier 12"],
        ),
    ],
    ids=["nothing", "well", "evicted", "failed", "waiting"],
)
def test_the_head_says_how_it_is(tab: Tab, now: ControllerStatus, headline: str, rest: list[str]) -> None:
    with StatusServer(now) as server:
        tab.open(server)
        assert tab.headline() == headline
        assert tab.page.locator("#facts li").all_inner_texts() == rest
        assert tab.page.title().endswith("weightsync")
        assert tab.page.locator("#models caption").inner_text() == "Models"
        assert tab.rows("models")[0][:2] == [*now.models][:1] + [*now.sync_mode.values()][:1]
        for part, there in (("fleet", now.instances), ("barriers", now.barriers), ("syncs", now.syncs)):
            assert tab.page.locator(f"#{part}-part").is_visible() == bool(there), part
    assert all(url.startswith("http://127.0.0.1:") for url in tab.requests), "nothing comes from elsewhere"


def test_tables(tab: Tab) -> None:
    with StatusServer(statuses.failed()) as server:
        tab.open(server)
        assert tab.rows("models") == [
            [
                "actor",
                "batch-async",
                statuses.RUN,
                "13",
                "12",
                "1",
                "sync is due failed 2 in a row",
                "waits",
                "",
                ERROR,
            ],
            ["verifier", "batch-async", statuses.RUN, "12", "12", "0", "running", "goes on", "", ""],
        ]
        assert tab.rows("fleet")[0] == ["inst-0", "live", "12", "12", "0.4 s", "4.6 s", ""]
        assert tab.page.locator("#models tbody td.wrong").inner_text() == "sync is due failed 2 in a row"
        server.now = status(models={"actor": statuses.model(3, -1)})
        tab.says("#models tbody tr:first-child :nth-child(6)", "all")
        assert tab.rows("models")[0][3:6] == ["3", "none", "all"]
        server.now = statuses.dark()
        tab.says("#headline", "actor: nobody answers")
        assert tab.rows("models")[0][6:8] == ["overdue", "nobody answers"]
        server.now = statuses.waiting()
        tab.says("#level", "BUSY")
        assert tab.rows("barriers") == [["actor, verifier", "13", "verifier", "actor 13, verifier 12", "4.0 s", "60 s"]]
        assert tab.page.locator("#barriers thead th").all_inner_texts()[2] == "missing"


def test_a_hundred_instances_the_troubled_first(tab: Tab) -> None:
    with StatusServer(statuses.hundred()) as server:
        tab.open(server)
        rows = tab.rows("fleet")
        assert len(rows) == 100
        assert rows[0] == ["rollout-63", "evicted", "11 1 behind", "11 1 behind", "61 s", "none", "heartbeat late 61 s"]
        assert [row[0] for row in rows[1:6]] == ["rollout-17", "rollout-40", "rollout-88", "rollout-0", "rollout-1"]
        assert rows[2][2] == "run-old/9 other run"
        assert tab.text("#fleet-count") == "1 evicted, 1 suspect, 1 joining, 97 live"
        heights = tab.page.eval_on_selector_all("#fleet tbody tr", "rows => rows.map(row => row.offsetHeight)")
        assert max(heights) < 30, "one line each"
        assert tab.page.locator("#timeline .sync").count() == 12
        assert tab.page.locator("#timeline .sync").first.locator(".bar").count() <= len(SPANS) * 6


@pytest.mark.parametrize("name", ["status", "hundred", "failed", "hostile"])
def test_a_telephone_shows_all_of_it(browser: Browser, name: str) -> None:
    with StatusServer(getattr(statuses, name)()) as server, Tab(browser, width=400, dark=True) as narrow:
        narrow.open(server)
        assert narrow.page.evaluate("document.documentElement.scrollWidth") <= 400
        color = narrow.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in re.findall(r"\d+", color)[:3]) < 60, "dark"
        assert narrow.page.get_by_role("table", name="Models").get_by_role("rowheader").count() > 0


def bar(tab: Tab, words: str) -> Locator:
    return tab.page.locator(f'#timeline .bar[aria-label*="{words}"]').first


def test_the_timeline_says_who_was_waited_for(tab: Tab) -> None:
    with StatusServer(status()) as server:
        tab.open(server)
        assert tab.page.locator("#legend li").all_inner_texts() == [
            name for name in SPANS if name not in ("batch gate", "retry")
        ]
        bar(tab, "transfer, inst-2").hover()
        tab.says("#said", "actor 12: transfer, inst-2: 1.2 s, from 0.6 s")
        first = tab.page.locator("#timeline .bar").first
        first.focus()
        tab.says("#said", "actor 12: trainer, actor: 0.5 s, from -0.5 s")
        tab.page.keyboard.press("ArrowRight")
        tab.says("#said", "actor 12: barrier, verifier: 0.4 s, from 0.0 s")
        assert tab.page.locator('#timeline .bar[tabindex="0"]').count() == 1
        server.now = status(syncs=(sync(13, before_s=1.0, outcome="failed", error="cut"), *server.now.syncs))
        tab.page.wait_for_selector(".sync-outcome.wrong")
        assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("actor 12: barrier")
        tab.page.locator("summary").click()
        words = tab.rows("words")
        assert [row[0] for row in words] == [f"actor {version}" for version in range(13, 6, -1)]
        assert words[0][2:] == ["failed, 2.6 s", words[1][3], "cut"]
        assert "transfer, inst-2: 1.2 s, from 0.6 s" in words[0][3]
        assert words[0][3].endswith("commit: 0.2 s, from 2.4 s")


def axis(tab: Tab) -> tuple[float, float]:
    """Where zero is, and how many pixels a second has."""
    ticks = tab.page.eval_on_selector_all(
        "#axis span",
        "all => all.map(tick => { const box = tick.getBoundingClientRect(); "
        "return [parseFloat(tick.textContent), box.x + box.width / 2]; })",
    )
    (low, left), (high, right) = min(ticks), max(ticks)
    scale = (right - left) / (high - low)
    return left - low * scale, scale


def test_bars_stand_where_their_seconds_are_and_a_slow_sync_is_shown_whole(tab: Tab) -> None:
    """One that ran into its deadline squeezes the rest; who zooms in sees that, and what is cut off says so."""
    with StatusServer(statuses.failed()) as server:
        tab.open(server)
        assert tab.page.locator(".lanes.cut").count() == 0
        assert tab.page.locator("#timeline .sync-outcome").first.inner_text() == "failed, 600 s"
        assert axis(tab)[1] * 600 > 500, "ten minutes are there, whole"
        good = tab.page.locator("#timeline .sync").nth(1)
        lanes = good.locator(".lanes").bounding_box()
        assert lanes
        closer = tab.page.get_by_role("button", name="Closer: the seconds of the last syncs")
        left = tab.page.get_by_role("button", name="To the left: the seconds of the last syncs")
        for _ in range(7):
            closer.click()
        for _ in range(2 * 2**7):
            if axis(tab)[0] > lanes["x"] - 20:
                break
            left.click()
        assert tab.page.locator(".lanes.cut").count() == 1
        pause = good.locator('[aria-label*="pause"]').bounding_box()
        assert pause
        zero, scale = axis(tab)
        assert pause["x"] == pytest.approx(zero + 2.3 * scale, abs=3)
        assert scale * 2.6 > lanes["width"] / 8
        tab.page.get_by_role("button", name="All of it: the seconds of the last syncs").click()
        assert tab.page.locator(".lanes.cut").count() == 0
        long = SyncSpan(name="trainer", start_s=-300.0, seconds=300.0)
        first = sync(13)
        server.now = status(syncs=(msgspec.structs.replace(first, spans=(long, *first.spans)), *status().syncs))
        tab.page.wait_for_selector('#timeline .bar[aria-label*="trainer: 300 s, from -300 s"]')
        zero, scale = axis(tab)
        box = bar(tab, "trainer: 300 s, from -300 s").bounding_box()
        assert box
        assert box["x"] == pytest.approx(zero - 300 * scale, abs=3)


def drag(tab: Tab, selector: str, *, start: float, end: float) -> None:
    """Over a part of an element, in shares of its width."""
    tab.page.locator(selector).scroll_into_view_if_needed()
    box = tab.page.locator(selector).bounding_box()
    assert box
    middle = box["y"] + box["height"] / 2
    tab.page.mouse.move(box["x"] + start * box["width"], middle)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + end * box["width"], middle, steps=4)
    tab.page.mouse.up()


def test_plots_over_versions_and_a_closer_look(tab: Tab, tmp_path: Path) -> None:
    """Every version is a point, the slow one too; a drag looks at a part, and keeps to it when the page asks again."""
    with StatusServer(statuses.plotted()) as server:
        tab.open(server)
        assert tab.page.locator("#plots-part").is_visible()
        seconds = tab.page.locator("#plot-seconds circle")
        assert seconds.count() == 18
        titles = tab.page.eval_on_selector_all("#plot-seconds circle", "all => all.map(dot => dot.textContent)")
        assert "actor 11: 40 s" in titles
        assert "actor 6: 1.1 s, failed" in titles
        heights = tab.page.eval_on_selector_all(
            "#plot-seconds circle", "all => all.map(dot => +dot.getAttribute('cy'))"
        )
        assert min(heights) == heights[10] > 0, "the slow one is the highest, and inside the picture"
        assert tab.page.locator("#plot-bytes circle").count() == tab.page.locator("#plot-rate circle").count() == 18
        assert "18 versions" in (tab.page.locator("#plot-rate").get_attribute("aria-label") or "")
        bar(tab, "transfer, inst-0").hover()
        tab.says("#said", re.compile(r"actor 18: transfer, inst-0: .* s; 208 MB, 0\.231 GB/s"))
        tab.page.screenshot(path=tmp_path / "plots.png", full_page=True)
        drag(tab, "#plot-seconds", start=0.2, end=0.5)
        zoomed = seconds.count()
        assert 3 <= zoomed < 9
        tab.page.evaluate("ask()")
        tab.page.wait_for_timeout(100)
        assert seconds.count() == zoomed
        tab.page.locator("#plot-seconds").dblclick()
        assert seconds.count() == 18
        # of the tests before it the page asked on, while the server went, or when another had its port
        assert [said for said in tab.complaints if "Failed to load resource" not in said] == []


def test_a_long_transfer_says_how_far_it_is(tab: Tab) -> None:
    with StatusServer(statuses.moving()) as server:
        tab.open(server)
        assert tab.page.locator("#fleet thead th").all_inner_texts()[4] == "transfer"
        assert [row[4] for row in tab.rows("fleet")] == [
            "actor 75 % of 16000 MB, 1500 MB/s, 2.7 s to go", "actor 25 % of 16000 MB, 500 MB/s, 24 s to go", "",
        ]  # fmt: skip
        assert "inst-1 has 4000 of 16000 MB (25 %), 500 MB/s, 24 s to go (the slowest of 2)" in tab.text("#detail")
        server.now = status()
        tab.says("#level", "OK")
        assert "transfer" not in tab.page.locator("#fleet thead th").all_inner_texts()


def test_it_follows_by_itself_and_says_when_nobody_answers(tab: Tab) -> None:
    port = free_port()
    with StatusServer(status(), port=port) as server:
        tab.open(server)
        server.now = statuses.evicted()
        tab.says("#headline", "1 of 3 instances is evicted: inst-2")
    tab.says("#headline", "No answer from the controller")
    tab.says("#detail", re.compile(r"^since \d+(\.\d)? s"))
    assert tab.text("#level") == "LOOK"
    tab.says("#facts li:first-child", "Before that: 1 of 3 instances is evicted: inst-2 (heartbeat late 12.3 s)")
    assert "stale" in (tab.page.locator("#main").get_attribute("class") or "")
    with StatusServer(status(), port=port):
        tab.says("#headline", "All 3 instances serve actor 12, verifier 12")
        assert "stale" not in (tab.page.locator("#main").get_attribute("class") or "")


def test_names_stay_text(browser: Browser) -> None:
    """Red with innerHTML in `put`: the image is there. Red without the policy: the script runs."""
    with StatusServer(statuses.hostile()) as server, Tab(browser) as hurt:
        hurt.open(server)
        assert HOSTILE in hurt.text("#headline")
        assert [row[0] for row in hurt.rows("models")] == [HOSTILE, "__proto__"]
        for _ in range(3):
            hurt.page.evaluate("ask()")
        fleet = hurt.rows("fleet")
        assert [row[0] for row in fleet[:2]] == [HOSTILE] * 2
        assert len(fleet) == 3, "one name twice is two rows, and stays two"
        assert fleet[2][0] == "9" * 400 + "…"
        assert fleet[0][-1] == HOSTILE * 3
        assert HOSTILE in hurt.page.locator("#timeline .bar").first.get_attribute("aria-label")  # type: ignore[operator]
        assert hurt.page.locator("img, #models a, #fleet a").count() == 0
        assert hurt.page.locator("script").count() == 2
        assert hurt.complaints == []
        hurt.page.evaluate(
            "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; "
            "document.body.append(s); }"
        )
        assert hurt.page.evaluate("window.ran") is None
        assert "Content Security Policy" in hurt.complaints[0]


def test_the_token_is_asked_for_and_kept_in_the_tab(browser: Browser) -> None:
    with StatusServer(status(), token=TOKEN) as server, Tab(browser) as guarded:
        guarded.page.goto(server.url)
        guarded.says("#headline", "This controller wants its token")
        assert guarded.text("#level") == "TOKEN"
        assert guarded.page.locator("#main").is_hidden()
        box = guarded.page.get_by_label("Token")
        assert box.get_attribute("type") == "password"
        box.fill("a-token-that-is-not-it")
        box.press("Enter")
        guarded.says("#token-said", "That is not this controller's token.")
        box.fill(TOKEN)
        guarded.page.get_by_role("button", name="Show").click()
        guarded.says("#headline", "All 3 instances serve actor 12, verifier 12")
        assert guarded.page.locator("#token-form").is_hidden()
        guarded.page.reload()
        guarded.says("#headline", "All 3 instances serve actor 12, verifier 12")
        assert not any(TOKEN in url for url in guarded.requests)
        assert guarded.page.evaluate("localStorage.length + document.cookie.length") == 0


EVIL_PAGE = """<!doctype html><title>evil</title><form method=post enctype=text/plain action=%s target=hole>
<input name='{"model_tag":"actor","x":"' value='"}'></form><iframe name=hole></iframe><script>
const told = [];
async function attack(url, rebound) {
  for (const type of ["text/plain", "application/x-www-form-urlencoded"])
    await fetch(url, {method: "POST", mode: "no-cors", headers: {"content-type": type}, body: '{"model_tag":"actor"}'})
      .catch(() => 0);
  await fetch(url, {method: "POST", headers: {"content-type": "application/json"}, body: '{"model_tag":"actor"}'})
    .catch(() => 0);
  document.forms[0].submit();
  for (const path of ["/status", "/overview"]) {
    const said = await fetch(rebound + path).then((answer) => answer.text(), (error) => String(error));
    told.push(said);
  }
  return told;
}</script>"""


def test_a_page_of_somebody_else_moves_nothing_and_reads_nothing(browser: Browser) -> None:
    """In a real browser: blind posts, a form, and a name of the page's own that leads to loopback (DNS rebinding)."""
    from tests.multiproc.fuzz_http import face
    from weightsync.clients.controller import ControllerClient

    with face("controller", None) as url, Tab(browser) as tab:
        port = url.rpartition(":")[2]
        path = "/trajectory_pool_notify_batch_ready"
        evil = Api("evil")
        evil.answer("GET", "/page", lambda: HTMLResponse(EVIL_PAGE % (url + path)))
        # under the very name that leads to the controller: to the browser it is one origin but for the port
        server = ServerThread(evil, hosts=("evil.example",))
        page_port = server.start().rpartition(":")[2]
        client = ControllerClient(url)
        before = client.status(timeout_s=WAIT_MS / 1000)
        page = tab.page
        try:
            page.goto(f"http://evil.example:{page_port}/page")
            rebound = f"http://evil.example:{port}"
            told = page.evaluate("([url, rebound]) => attack(url, rebound)", [url + path, rebound])
            assert not any("actor" in said for said in told), told
            answer = page.goto(f"{rebound}/status")  # as the page's own origin, after its name has moved
            assert answer is not None
            assert answer.status == 403
            assert "actor" not in page.content()
        finally:
            server.close()
        after = client.status(timeout_s=WAIT_MS / 1000)
        assert after.models == before.models, "no post was obeyed"
        client.trajectory_pool_notify_batch_ready("actor")
        assert client.status(timeout_s=WAIT_MS / 1000).models != before.models, "or the posts prove nothing"
        client.close()
