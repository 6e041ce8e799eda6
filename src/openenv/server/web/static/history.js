/**
 * History: everything that was done in this page's episodes, newest first, with a filter, details on demand, and a
 * download. A reset begins a new episode and keeps the earlier ones.
 */

import { el, fill, focusOn, icon } from "./element.js";
import { ObservationView } from "./observation.js";
import { outcomeBadge, outcomeKind } from "./outcome.js";
import { briefAction, formatDuration, formatNumber, formatReward, formatTime, shortJson } from "./values.js";
import { resultNode, treeOf } from "./view.js";

const PAGE = 100;

/** @typedef {import("./episode.js").LogItem} LogItem */

/** The table of steps and calls. */
export class History {
  /**
   * @param {import("./episode.js").Episode} episode
   * @param {object} options
   * @param {string} options.name - Of the environment, for the downloaded file.
   * @param {(action: any) => void} options.reuse - Put an action into the form.
   */
  constructor(episode, { name, reuse }) {
    this.episode = episode;
    this.name = name;
    this.reuse = reuse;
    this.isShown = false;
    this.most = PAGE;
    /** @type {LogItem | null} */
    this.opened = null;
    this.filter = el("input", {
      type: "search",
      placeholder: "Filter",
      "aria-label": "Filter the history",
      on: { input: () => this.#restart() },
    });
    this.count = el("p.hint", { role: "status" });
    this.rows = el("tbody");
    this.more = el("button", { type: "button", hidden: true, on: { click: () => this.#grow() } }, "Show more");
    this.empty = el("p.empty-line", {}, "No actions yet.");
    const download = el(
      "button",
      { type: "button", on: { click: () => this.#download() } },
      icon("save"),
      "Download JSON",
    );
    const titles = ["Step", "Time", "Action", "Reward", "Took", ""].map((title) =>
      el("th", { scope: "col" }, title || el("span.unseen", {}, "Details")),
    );
    this.table = el(
      "table.log",
      {},
      el("caption.unseen", {}, "Actions of this page's episodes"),
      el("thead", {}, el("tr", {}, titles)),
      this.rows,
    );
    const head = el("div.toolbar", {}, this.filter, this.count, download);
    this.node = el(
      "section.card",
      {},
      el("h2.unseen", {}, "History"),
      head,
      this.empty,
      el("div.scroll", {}, this.table),
      this.more,
    );
    episode.subscribe(() => this.#draw());
  }

  /** @param {boolean} isShown */
  show(isShown) {
    this.isShown = isShown;
    if (isShown) this.#draw();
  }

  #restart() {
    this.most = PAGE;
    this.#draw();
  }

  #grow() {
    this.most += PAGE;
    this.#draw();
  }

  #draw() {
    if (!this.isShown) return;
    const found = this.#found();
    const all = this.episode.log.length + this.episode.past.count;
    this.empty.hidden = all > 0;
    this.table.hidden = found.length === 0;
    const older = this.episode.dropped ? `, the newest of ${all + this.episode.dropped}` : "";
    this.count.textContent =
      all === 0
        ? ""
        : found.length === all
          ? `${all} ${all === 1 ? "entry" : "entries"}${older}`
          : `${found.length} of ${all}`;
    /** @type {import("./past_episodes.js").PastEpisode | null} */
    let before = null;
    fill(
      this.rows,
      found.slice(0, this.most).flatMap(({ item, episode }) => {
        const isNext = episode !== before;
        before = episode;
        return [isNext && episode !== null && pastRow(episode), ...this.#row(item)];
      }),
    );
    this.more.hidden = found.length <= this.most;
  }

  /** The entries of this episode and of earlier ones, the newest first, as far as the filter lets them through. */
  #found() {
    const wanted = this.filter.value.trim().toLowerCase();
    /** @type {(import("./past_episodes.js").PastEpisode | null)[]} */
    const episodes = [null, ...this.episode.past.list];
    const items = episodes.flatMap((episode) =>
      (episode ?? this.episode).log.map((item) => ({ item, episode })).reverse(),
    );
    if (wanted === "") return items;
    return items.filter(({ item }) => JSON.stringify(item.entry).toLowerCase().includes(wanted));
  }

  /** @param {LogItem} item */
  #row(item) {
    const isOpen = this.opened === item;
    const { entry } = item;
    const toggle = () => {
      this.opened = isOpen ? null : item;
      this.#draw();
      focusOn(this.rows, '[aria-expanded="true"]');
    };
    const what =
      item.kind === "step"
        ? briefAction(item.entry.action)
        : `${item.entry.name}(${shortJson(item.entry.arguments, 80)})`;
    const button = el(
      "button.link.what",
      { type: "button", "aria-expanded": String(isOpen), on: { click: toggle } },
      what,
    );
    const reward = item.kind === "step" ? rewardCell(item.entry) : el("td.number", {}, item.entry.error ? "error" : "");
    const row = el(
      "tr",
      { data: { kind: item.kind } },
      el("td.number", {}, item.kind === "step" ? item.entry.step_count : "tool"),
      el("td.time", {}, formatTime(entry.timestamp)),
      el("td", {}, button),
      reward,
      el("td.number", {}, formatDuration(entry.duration_ms ?? NaN)),
      el("td", {}, item.kind === "step" && item.entry.done ? endBadge(item.entry) : ""),
    );
    return isOpen ? [row, this.#details(item)] : [row];
  }

  /** @param {LogItem} item */
  #details(item) {
    const parts = item.kind === "step" ? this.#stepDetails(item.entry) : callDetails(item.entry);
    return el("tr.details", {}, el("td", { colspan: 6 }, el("div.details-grid", {}, parts)));
  }

  /** @param {import("./episode.js").StepEntry} entry */
  #stepDetails(entry) {
    const view = new ObservationView();
    view.show(entry.observation, null);
    const again = el(
      "button.small",
      { type: "button", on: { click: () => this.reuse(entry.action) } },
      "Use this action again",
    );
    return [
      el("section", {}, el("h3", {}, "Action"), treeOf(entry.action), again),
      el("section", {}, el("h3", {}, "Observation"), view.node),
    ];
  }

  #download() {
    const { episodeId, past } = this.episode;
    const data = {
      environment: this.name,
      ...documentOf(this.episode),
      earlier_episodes: past.list.map(documentOf),
    };
    const url = URL.createObjectURL(new Blob([JSON.stringify(data, null, 2)], { type: "application/json" }));
    const link = el("a", { href: url, download: `${this.name}-${episodeId ?? "episode"}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }
}

/** @param {import("./past_episodes.js").PastEpisode} episode */
function documentOf({ episodeId, seed, total, log }) {
  return { episode_id: episodeId, seed, total_reward: total, log: log.map(({ kind, entry }) => ({ kind, ...entry })) };
}

/** The line above the actions of an earlier episode. @param {import("./past_episodes.js").PastEpisode} episode */
function pastRow({ seed, total, log }) {
  const facts = [
    "Earlier episode",
    seed !== null && `seed ${seed}`,
    `${log.length} ${log.length === 1 ? "action" : "actions"}`,
    `total ${formatNumber(total)}`,
  ];
  return el("tr.past-episode", {}, el("th", { colspan: 6, scope: "rowgroup" }, facts.filter(Boolean).join(" · ")));
}

/** @param {import("./episode.js").StepEntry} entry */
function rewardCell(entry) {
  const cell = el("td.number", {}, formatReward(entry.reward));
  cell.classList.toggle("is-negative", Number(entry.reward) < 0);
  return cell;
}

/** @param {import("./episode.js").CallEntry} entry */
function callDetails(entry) {
  return [
    el("section", {}, el("h3", {}, "Arguments"), treeOf(entry.arguments)),
    el(
      "section",
      {},
      el("h3", {}, entry.error ? "Error" : "Result"),
      entry.error ? treeOf(entry.error) : resultNode(entry.result),
    ),
  ];
}

/** @param {import("./episode.js").StepEntry} entry */
function endBadge({ done, reward, observation }) {
  const { truncated, terminated } = observation ?? {};
  return outcomeBadge(outcomeKind({ done, reward, truncated, terminated }), { text: "done" });
}
