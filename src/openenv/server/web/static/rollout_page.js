/**
 * One rollout: what came of it, its transcript, files, verdicts and time; a running one is followed.
 */

import { rolloutApi } from "./api.js";
import { rewardBadge, statusBadge, trustBadge } from "./badges.js";
import { ChangesView } from "./changes.js";
import { copyButton } from "./copy.js";
import { el, fill, uniqueId } from "./element.js";
import { pairAddress, rolloutAddress } from "./rollout_address.js";
import { Tabs } from "./tabs.js";
import { codeBlock, folded, formatAge, formatMoment, visible } from "./texts.js";
import { AgentOutput, Timeline } from "./timeline.js";
import { TranscriptView } from "./transcript.js";
import { Tree } from "./tree.js";
import { formatSeconds } from "./values.js";
import { checkNode, verdictsNode } from "./verdicts.js";

const EVERY_MS = 700;
const PARTS = ["transcript", "files", "checks", "timeline", "task"];

/** A page about one rollout. */
export class RolloutPage {
  /**
   * @param {string} id
   * @param {object} options
   * @param {string} options.part - Which tab comes first.
   * @param {string} options.verdict - Which verdict is reported; empty for the first.
   * @param {(error: any) => boolean} options.refused
   */
  constructor(id, { part, verdict, refused }) {
    this.id = id;
    this.part = PARTS.includes(part) ? part : "transcript";
    this.verdict = verdict;
    this.refused = refused;
    this.isClosed = false;
    this.timer = 0;
    this.node = el("div.stack.is-tight", {}, el("p.hint", {}, "Loading…"));
    this.#load();
  }

  /** Stop following. */
  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
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
      fill(this.node, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message), backLink());
    }
  }

  /** @param {any} rollout */
  #draw(rollout) {
    const isBegun = rollout.begun !== null;
    this.transcript = new TranscriptView(this.id);
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
        ...(isBegun
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
      ],
      focused,
      { label: "Parts of the rollout", prefix: "rollout-", onSelect: (part) => this.#address(part) },
    );
    const head = isBegun ? begunHead(rollout) : storedHead(rollout, this.verdict);
    fill(this.node, backLink(), head, this.tabs.list, this.tabs.body);
    if (isBegun) this.#follow(rollout);
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

function backLink() {
  return el("p", {}, el("a", { href: "#rollouts", on: { click: goBack } }, "← All rollouts"));
}

/** Go back to the list as it was, if the visitor came from it. @param {Event} event */
function goBack(event) {
  if (history.state?.isFromList) {
    event.preventDefault();
    history.back();
  }
}

/** @param {any} rollout */
function begunHead({ rollout_id: id, begun }) {
  const state = begun.is_running ? "busy" : "lost";
  return el(
    "header.rollout-head.card",
    {},
    el("h2", {}, visible(begun.task_id || id)),
    el(
      "p.badges",
      {},
      el(
        "span.chip",
        { role: "status", data: { state } },
        begun.is_running ? "running" : "interrupted: its engine died",
      ),
    ),
    facts({
      Agent: begun.agent,
      Model: begun.model,
      Sandbox: begun.sandbox,
      Group: begun.group,
      Begun: formatMoment(begun.began_at),
      Id: id,
    }),
  );
}

/** @param {any} rollout @param {string} verdict */
function storedHead(rollout, verdict) {
  const { outcome, rollout_id: id } = rollout;
  const count = rollout.verdicts.length;
  const field = uniqueId("compare");
  const other = el("input", { id: field, placeholder: "id", autocomplete: "off", size: 12 });
  const form = el(
    "form.compare-with",
    {},
    el("label.hint", { for: field }, "Compare with"),
    other,
    el("button.small", {}, "Compare"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (other.value.trim()) location.hash = pairAddress(id, other.value.trim());
  });
  return el(
    "header.rollout-head.card",
    {},
    el("h2", {}, visible(outcome.task_id || id)),
    el(
      "p.badges",
      {},
      el("span.reward-label", {}, "Reward"),
      rewardBadge(outcome.reward),
      trustBadge(outcome.trust),
      statusBadge(outcome.status, outcome.reason),
      verdict && el("span.badge", {}, `verdict ${rollout.verdict}`),
      count > 1 && el("span.badge", {}, `${count} verdicts`),
    ),
    outcome.reason && el("p.problem", {}, `${outcome.phase}: `, visible(outcome.reason)),
    facts({
      Agent: outcome.agent,
      Model: outcome.model,
      Sandbox: outcome.sandbox,
      Group: rollout.group,
      Begun: `${formatMoment(outcome.started_at)} (${formatAge(Date.now() / 1000 - outcome.started_at)} ago)`,
      Took: formatSeconds(outcome.wall_s),
      Calls: String(rollout.turns),
      Id: id,
    }),
    el(
      "div.toolbar",
      {},
      copyButton(() => new URL(rolloutAddress(id, "", verdict), location.href).href),
      el("span.hint", {}, "its address"),
      form,
    ),
  );
}

/** @param {Record<string, string>} values */
function facts(values) {
  const shown = Object.entries(values).filter(([, value]) => value !== "" && value !== undefined);
  return el(
    "dl.facts",
    {},
    shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(value)))),
  );
}

/** @param {any} outcome */
function setupNode(outcome) {
  if (!outcome || outcome.setup_results.length === 0) return null;
  const lines = () =>
    el(
      "ol.checks",
      {},
      outcome.setup_results.map((/** @type {any} */ result) => checkNode(result)),
    );
  return folded([`Setup, ${outcome.setup_results.length} lines`], lines);
}

/** @param {any} rollout */
function taskNode({ task, outcome }) {
  if (!task) return el("p.hint", {}, "The task was not stored.");
  const texts = (/** @type {string} */ title, /** @type {Record<string, string>} */ files) =>
    Object.entries(files).map(([path, text]) =>
      folded([`${title} `, el("code", {}, visible(path))], () => codeBlock(text, { label: path })),
    );
  const { instruction, files, verify_files: verifyFiles, ...rest } = task;
  const tree = new Tree();
  tree.show({ ...rest, ...(outcome ? { outcome: outcome.metadata } : {}) });
  return el(
    "div.stack.is-tight",
    {},
    el("section", {}, el("h3", {}, "Instruction"), codeBlock(instruction, { kind: ".said" })),
    texts("File", files ?? {}),
    texts("File of the verifier", verifyFiles ?? {}),
    folded(["Everything else"], () => tree.node, { isOpen: true }),
  );
}
