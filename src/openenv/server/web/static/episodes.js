/**
 * Episodes: all that were recorded with a curve over them, one to replay, or two side by side, as the address says.
 */

import { address, api } from "./api.js";
import { Curve } from "./curve.js";
import { el, fill, focusOn, icon } from "./element.js";
import { episodePair } from "./episode_pair.js";
import { pageAddress, pagePlace } from "./places.js";
import { Replay, rewardPlot, summaryBadges, summaryFacts } from "./replay.js";
import { formatMoment } from "./texts.js";
import { formatNumber, formatSeconds } from "./values.js";

const TAB = "episodes";
const EVERY_MS = 3000;
const PAGE = 100;
const LISTED = 400;

/** The tab of recorded episodes. */
export class Episodes {
  /** @param {object} options @param {(error: any) => boolean} options.refused */
  constructor({ refused }) {
    this.refused = refused;
    this.isShown = false;
    this.timer = 0;
    this.most = PAGE;
    this.count = 0;
    this.drawn = "";
    this.at = "";
    /** @type {any[]} */
    this.episodes = [];
    /** @type {Set<string>} */
    this.picked = new Set();
    /** @type {Replay[]} */
    this.replays = [];
    this.node = el("div.episodes");
    this.#assemble();
    addEventListener("hashchange", () => this.isShown && pagePlace(location.hash).tab === TAB && this.#route());
  }

  /** @param {boolean} isShown */
  show(isShown) {
    if (isShown === this.isShown) return;
    this.isShown = isShown;
    clearTimeout(this.timer);
    if (!isShown) return this.#leave();
    if (pagePlace(location.hash).tab !== TAB) history.replaceState(null, "", this.at || pageAddress(TAB));
    this.#route();
  }

  #assemble() {
    this.curve = new Curve((id) => (location.hash = pageAddress(TAB, [id])));
    this.status = el("p.hint", { role: "status" });
    this.problem = el("p.problem", { hidden: true, role: "alert" });
    this.rows = el("tbody");
    this.more = el("button", { type: "button", hidden: true, on: { click: () => this.#grow() } }, "Show more");
    this.compare = el(
      "button",
      { type: "button", "aria-disabled": "true", on: { click: () => this.#comparePicked() } },
      "Compare two",
    );
    this.empty = el(
      "p.empty-line",
      {},
      "No episodes yet. An episode appears after its first step and stays after a reset.",
    );
    const titles = ["", "Episode", "End", "Return", "Steps", "Seed", "Took", "Played by"];
    this.table = el(
      "table.log",
      {},
      el("caption.unseen", {}, "Recorded episodes, newest first"),
      el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title || el("span.unseen", {}, "Compare"))))),
      this.rows,
    );
    this.list = el(
      "div.stack.is-tight",
      {},
      el("section.card", {}, el("h2", {}, "Return by episode"), this.curve.node),
      el(
        "section.card",
        {},
        el("h2.unseen", {}, "Episodes"),
        el("div.toolbar", {}, this.status, this.compare),
        this.problem,
        this.empty,
        el("div.scroll", { tabindex: 0, role: "group", "aria-label": "Table of episodes" }, this.table),
        this.more,
      ),
    );
  }

  #route() {
    const { parts, query } = pagePlace(location.hash);
    const [id, word, other] = parts;
    this.at = location.hash;
    this.#leave();
    if (id === undefined) {
      fill(this.node, this.list);
      this.#refresh();
    } else if (word === "with" && other) {
      this.#pair([id, other]);
    } else {
      this.#one(id, query.get("step"));
    }
  }

  #leave() {
    clearTimeout(this.timer);
    for (const replay of this.replays) replay.close();
    this.replays = [];
  }

  async #refresh() {
    clearTimeout(this.timer);
    if (!document.hidden) await this.#ask();
    clearTimeout(this.timer);
    if (this.isShown && this.list.isConnected) this.timer = window.setTimeout(() => this.#refresh(), EVERY_MS);
  }

  async #ask() {
    try {
      const { recording, count, episodes } = await api.episodes(Math.max(LISTED, this.most + 1));
      this.episodes = episodes;
      this.count = count;
      this.#draw(recording);
    } catch (error) {
      if (!this.refused(error)) this.#complain(/** @type {Error} */ (error).message);
    }
  }

  /** @param {string | null} text */
  #complain(text) {
    this.problem.hidden = !text;
    this.problem.textContent = text ?? "";
  }

  /** @param {any} recording */
  #draw(recording) {
    const { episodes } = this;
    this.#complain(recording.problem);
    const whose = !recording.is_on ? "Nothing is recorded now" : recording.is_for_all ? "All sessions" : "This page";
    const skipped = recording.skipped ? `; ${recording.skipped} left out while the server was busy` : "";
    this.status.textContent = `${this.count} kept of at most ${recording.most}. Recorded: ${whose.toLowerCase()}${skipped}.`;
    this.status.title = recording.folder;
    const text = JSON.stringify([episodes.slice(0, this.most), [...this.picked], episodes.length]);
    if (text === this.drawn) return;
    this.drawn = text;
    this.curve.show(episodes);
    this.empty.hidden = episodes.length > 0;
    this.table.hidden = this.compare.hidden = episodes.length === 0;
    this.more.hidden = episodes.length <= this.most;
    const focused = document.activeElement?.closest("tr[data-episode]")?.getAttribute("data-episode");
    const kind = document.activeElement?.tagName.toLowerCase();
    fill(
      this.rows,
      episodes.slice(0, this.most).map((episode) => this.#row(episode)),
    );
    if (focused && kind) focusOn(this.rows, `tr[data-episode="${CSS.escape(focused)}"] ${kind}`);
    this.#drawCompare();
  }

  #drawCompare() {
    this.compare.setAttribute("aria-disabled", String(this.picked.size !== 2));
    this.compare.title = this.picked.size === 2 ? "" : "Select two episodes first";
  }

  #grow() {
    this.most += PAGE;
    this.#ask();
  }

  /** @param {any} episode */
  #row(episode) {
    const { id } = episode;
    const tick = el("input", {
      type: "checkbox",
      "aria-label": `Compare ${id}`,
      checked: this.picked.has(id),
      on: { change: () => this.#pick(id, tick.checked) },
    });
    return el(
      "tr",
      { data: { episode: id } },
      el("td", {}, tick),
      el("td", {}, el("a", { href: pageAddress(TAB, [id]), title: id }, formatMoment(episode.began_at))),
      el("td", {}, el("span.marks", {}, summaryBadges(episode))),
      el("td.number", {}, formatNumber(episode.return)),
      el("td.number", {}, episode.steps),
      el("td.number", {}, episode.seed ?? "–"),
      el("td.number", {}, formatSeconds(Math.max(0, (episode.ended_at ?? episode.began_at) - episode.began_at))),
      el("td", {}, episode.opened_by),
    );
  }

  /** @param {string} id @param {boolean} isPicked */
  #pick(id, isPicked) {
    if (isPicked) this.picked.add(id);
    else this.picked.delete(id);
    if (this.picked.size > 2) this.picked.delete([...this.picked][0]);
    for (const box of this.rows.querySelectorAll("input")) {
      box.checked = this.picked.has(box.closest("tr")?.dataset.episode ?? "");
    }
    this.#drawCompare();
  }

  #comparePicked() {
    const [one, other] = [...this.picked].sort();
    if (other) location.hash = pageAddress(TAB, [one, "with", other]);
  }

  /** @param {string} id @param {string | null} step */
  async #one(id, step) {
    const place = location.hash;
    const found = await this.#load([id]);
    if (!found || place !== location.hash) return;
    const [{ summary, rows }] = found;
    const replay = new Replay(rows, {
      step: step === null ? undefined : Number(step) || 0,
      onMove: (at) => {
        this.at = pageAddress(TAB, [id], { step: String(at) });
        history.replaceState(null, "", this.at);
      },
    });
    this.replays = [replay];
    const download = el(
      "a.button",
      { href: address(`./episodes/${encodeURIComponent(id)}/download`).href, download: `episode-${id}.jsonl` },
      icon("save"),
      "Download JSONL",
    );
    fill(
      this.node,
      el("p", {}, el("a", { href: pageAddress(TAB) }, "← All episodes")),
      el(
        "section.card.episode-head",
        {},
        el("div.card-head", {}, el("h2", {}, `Episode ${id}`), el("div.marks", {}, summaryBadges(summary)), download),
        summaryFacts(summary),
      ),
      replay.node,
      el("section.card", {}, el("h2", {}, "Rewards"), rewardPlot(replay.frames)),
    );
  }

  /** @param {string[]} ids */
  async #pair(ids) {
    const place = location.hash;
    const found = await this.#load(ids);
    if (!found || place !== location.hash) return;
    const { nodes, replays } = episodePair(found, TAB);
    this.replays = replays;
    fill(this.node, el("p", {}, el("a", { href: pageAddress(TAB) }, "← All episodes")), nodes);
  }

  /** @param {string[]} ids @returns {Promise<any[] | null>} */
  async #load(ids) {
    fill(this.node, el("p.hint", { role: "status" }, "Loading…"));
    try {
      return await Promise.all(ids.map((id) => api.episode(id)));
    } catch (error) {
      if (this.refused(error)) return null;
      fill(
        this.node,
        el("p", {}, el("a", { href: pageAddress(TAB) }, "← All episodes")),
        el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message),
      );
      return null;
    }
  }
}
