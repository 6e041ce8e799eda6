/**
 * One rollout: what came of it, its transcript, files, verdicts and time; a running one is followed.
 */

import { rolloutApi } from "./api.js";
import { ChangesView } from "./changes.js";
import { el, fill } from "./element.js";
import { Replay, rewardPlot } from "./replay.js";
import { rolloutAddress } from "./rollout_address.js";
import { backLink, begunHead, besideLinks, recordView, setupNode, storedHead, taskNode } from "./rollout_head.js";
import { branchCounts, rolloutTree } from "./rollout_tree.js";
import { Tabs } from "./tabs.js";
import { AgentOutput, Timeline } from "./timeline.js";
import { TranscriptView } from "./transcript.js";
import { verdictsNode } from "./verdicts.js";

const EVERY_MS = 700;
const PARTS = ["transcript", "episode", "branches", "files", "checks", "timeline", "task", "json"];

/** A page about one rollout. */
export class RolloutPage {
  /**
   * @param {string} id
   * @param {object} options
   * @param {string} options.part - Which tab comes first.
   * @param {string} options.verdict - Which verdict is reported; empty for the first.
   * @param {(error: any) => boolean} options.refused
   * @param {URLSearchParams} [options.list] - The list that the visitor came from.
   * @param {(address: string) => void} [options.goTo] - Replaces this page by that of another rollout.
   */
  constructor(id, { part, verdict, refused, list, goTo }) {
    this.id = id;
    this.part = PARTS.includes(part) ? part : "transcript";
    this.verdict = verdict;
    this.refused = refused;
    this.list = list;
    this.goTo = goTo;
    this.isClosed = false;
    this.timer = 0;
    this.beside = { before: null, after: null };
    this.keys = (/** @type {KeyboardEvent} */ event) => this.#key(event);
    this.paper = () => this.transcript?.unfold();
    if (goTo) addEventListener("keydown", this.keys);
    addEventListener("beforeprint", this.paper);
    this.node = el("div.stack.is-tight", {}, el("p.hint", {}, "Loading…"));
    this.#load();
  }

  /** Stop following. */
  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.replay?.close();
    removeEventListener("keydown", this.keys);
    removeEventListener("beforeprint", this.paper);
  }

  /** Show a part. @param {string} part */
  select(part) {
    if (PARTS.includes(part)) this.tabs?.select(part);
  }

  async #load() {
    try {
      const query = new URLSearchParams(this.verdict ? { verdict: this.verdict } : {});
      const rollout = await rolloutApi.one(this.id, "", query);
      if (this.isClosed) return;
      this.id = rollout.rollout_id;
      this.#draw(rollout);
    } catch (error) {
      if (this.refused(error)) return;
      fill(this.node, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message), el("p", {}, backLink()));
    }
  }

  /** @param {any} rollout */
  #draw(rollout) {
    const isBegun = rollout.begun !== null;
    const rewards = rollout.outcome?.metadata?.turn_rewards ?? {};
    const { nodes, left_out: leftOut } = rollout.tree ?? { nodes: [], left_out: 0 };
    this.transcript = new TranscriptView(this.id, { rewards, branches: branchCounts(nodes, this.id) });
    this.changes = new ChangesView(this.id);
    this.timeline = new Timeline();
    this.output = new AgentOutput(this.id);
    this.timeline.show(rollout.events, rollout.outcome?.phase_s ?? {}, isBegun && rollout.begun.is_running);
    this.tabs?.tabs.forEach((tab) => tab.onShow?.(false));
    const focused = this.tabs?.chosen ?? this.part;
    this.tabs = new Tabs(
      [
        {
          id: "transcript",
          title: "Transcript",
          node: this.transcript.node,
          onShow: once(() => !isBegun && this.transcript?.load()),
        },
        ...(isBegun || !rollout.has_steps ? [] : [this.#episodeTab()]),
        ...(nodes.length === 0
          ? []
          : [{ id: "branches", title: `Branches (${nodes.length - 1})`, node: rolloutTree(nodes, this.id, leftOut) }]),
        ...(isBegun || rollout.has_steps
          ? []
          : [
              { id: "files", title: "Files", node: this.changes.node, onShow: once(() => this.changes?.load()) },
              {
                id: "checks",
                title: `Checks (${rollout.verdicts[0].results.length})`,
                node: verdictsNode(rollout.verdicts, rollout.verdict),
              },
            ]),
        {
          id: "timeline",
          title: "Time and log",
          node: el("div.stack.is-tight", {}, this.timeline.node, setupNode(rollout.outcome), this.output.node),
          onShow: once(() => !isBegun && this.output?.load()),
        },
        { id: "task", title: "Task", node: taskNode(rollout) },
        ...(isBegun ? [] : [this.#recordTab()]),
      ],
      focused,
      { label: "Parts of the rollout", prefix: "rollout-", onSelect: (part) => this.#address(part) },
    );
    const head = isBegun ? begunHead(rollout) : storedHead(rollout, this.verdict);
    this.bar = el("nav.rollout-bar", { "aria-label": "Rollouts" }, backLink());
    fill(this.node, this.bar, head, this.tabs.list, this.tabs.body);
    if (isBegun) this.transcript.merge([]);
    if (isBegun) this.#follow(rollout);
    else this.#findBeside();
  }

  /** The steps of a played episode, with pictures and rewards. */
  #episodeTab() {
    const node = el("div.stack.is-tight", {}, el("p.hint", {}, "Loading…"));
    const load = async () => {
      try {
        const { rows } = await rolloutApi.one(this.id, "steps");
        this.replay = new Replay(rows, { step: 0 });
        fill(node, this.replay.node, el("section.card", {}, el("h2", {}, "Rewards"), rewardPlot(this.replay.frames)));
      } catch (error) {
        fill(node, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message));
      }
    };
    return { id: "episode", title: "Episode", node, onShow: once(load) };
  }

  #recordTab() {
    const { node, load } = recordView(this.id, this.verdict);
    return { id: "json", title: "JSON", node, onShow: once(load) };
  }

  /** Offer the rollouts before and after this one. */
  async #findBeside() {
    if (!this.goTo) return;
    try {
      this.beside = await rolloutApi.one(this.id, "beside", this.list);
    } catch {
      return; // the page is complete without
    }
    if (this.isClosed) return;
    const links = besideLinks(this.beside, (id) => this.#addressOf(id), (id) => this.goTo?.(this.#addressOf(id)));
    this.bar?.append(el("span.beside", {}, links));
  }

  /** @param {string} id */
  #addressOf(id) {
    const part = this.tabs?.chosen ?? "";
    return rolloutAddress(id, part === "transcript" ? "" : part, this.verdict);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const { target } = event;
    const isTyping = target instanceof HTMLElement && target.closest("input, textarea, select, [contenteditable]");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !this.node.isConnected) return;
    const isReading = this.tabs?.chosen === "transcript";
    const { before, after } = this.beside;
    if (event.key === "n" && after) this.goTo?.(this.#addressOf(after));
    else if (event.key === "p" && before) this.goTo?.(this.#addressOf(before));
    else if (event.key === "j" && isReading) this.transcript?.step(1);
    else if (event.key === "k" && isReading) this.transcript?.step(-1);
    else if (event.key === "/" && isReading) this.transcript?.search.focus();
    else return;
    event.preventDefault();
  }

  /** @param {string} part */
  #address(part) {
    history.replaceState(history.state, "", rolloutAddress(this.id, part === "transcript" ? "" : part, this.verdict));
  }

  /** Ask a running rollout what it has done since. @param {any} rollout */
  #follow(rollout) {
    const known = { events: rollout.events, size: 0, turn: 0 };
    const ask = async () => {
      try {
        const query = new URLSearchParams({
          events: String(known.events.length),
          start: String(this.output?.end ?? 0),
          size: String(known.size),
          turn: String(known.turn),
        });
        const news = await rolloutApi.one(this.id, "live", query);
        if (this.isClosed) return;
        if (news.state === "stored") return void this.#load();
        known.events = [...known.events, ...news.events];
        known.size = news.size;
        this.timeline?.show(known.events, {}, news.state === "running");
        this.output?.take(news.log);
        this.transcript?.merge(news.turns);
        const last = news.turns[news.turns.length - 1];
        known.turn = last ? last.number : known.turn;
        const chip = this.node.querySelector(".rollout-head .chip");
        if (chip instanceof HTMLElement && news.state === "interrupted") {
          chip.dataset.state = "lost";
          chip.textContent = "interrupted: its engine died";
          return;
        }
        const phase = known.events[known.events.length - 1]?.phase;
        if (chip && phase) chip.textContent = `running: ${phase}`;
      } catch (error) {
        if (this.isClosed || this.refused(error)) return;
      }
      this.timer = window.setTimeout(ask, document.hidden ? 4 * EVERY_MS : EVERY_MS);
    };
    ask();
  }
}

/** Call a function when a tab is first shown. @param {() => any} work */
function once(work) {
  let isDone = false;
  return (/** @type {boolean} */ isShown) => {
    if (!isShown || isDone) return;
    isDone = true;
    work();
  };
}

