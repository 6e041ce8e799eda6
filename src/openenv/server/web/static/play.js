/**
 * Play: act, see what comes of it, and how it was rewarded.
 */

import { ActionCard } from "./action.js";
import { Chat, chatField } from "./chat.js";
import { el, fill, icon } from "./element.js";
import { Notices } from "./notices.js";
import { ObservationView } from "./observation.js";
import { outcomeBadge, outcomeKind } from "./outcome.js";
import { Plot } from "./plot.js";
import { PythonBox, stepSource } from "./python.js";
import { shapeOf, withoutDefaults } from "./schema.js";
import { StatePanel } from "./state.js";
import { briefAction, formatNumber, formatReward } from "./values.js";

const LAST_STEPS = 6;

/** The first tab. */
export class Play {
  badges = el("div.badges", { "aria-live": "polite" });
  latest = el("ol.latest");
  total = el("p.stat");
  state = new StatePanel();
  /** What was drawn last, so that it is not drawn again. */
  drawn = "";
  badgeText = "";

  /**
   * @param {any} page
   * @param {import("./player.js").Player} player
   * @param {import("./header.js").Header} header
   */
  constructor(page, player, header) {
    this.page = page;
    this.player = player;
    this.header = header;
    this.episode = player.episode;
    this.python = new PythonBox("The same call in Python");
    this.action = new ActionCard(page, player, (action) => this.#source(action));
    this.plot = new Plot();
    this.observation = new ObservationView();
    this.notices = new Notices(this.episode, () => header.reset());
    const field = chatField(page);
    this.chat = field === null ? null : this.#chat(field);
    this.empty = this.#emptyNode();
    this.node = this.#assemble();
    this.episode.subscribe(() => this.#draw());
    this.refreshSource();
  }

  /** Write the source again, since the options of a reset have changed. */
  refreshSource() {
    this.#source(this.acted ?? this.action.value);
  }

  /** Do what Ctrl+Enter does. */
  submit() {
    if (this.chat) this.chat.send();
    else this.action.submit();
  }

  /** @param {any} action */
  #source(action) {
    this.acted = action;
    const { seed } = this.episode;
    this.written = seed;
    const reset = { ...(seed === null ? {} : { seed }), ...this.header.options };
    this.python.show(stepSource({ needsToken: this.page.asks_for_token, reset, action: this.#brief(action) }));
  }

  /** An action without what would be so anyway. @param {any} action */
  #brief(action) {
    const tool = this.page.tools?.find((/** @type {any} */ tool) => tool.name === action?.tool_name);
    if (!tool) return withoutDefaults(this.#filled(action), this.page.action.schema);
    return { ...action, arguments: withoutDefaults(action.arguments, tool.input_schema) };
  }

  /** An action with an example of each required field that is still empty: the source must run. @param {any} action */
  #filled(action) {
    const { schema, example } = this.page.action;
    const required = /** @type {string[]} */ (schema.required ?? []);
    const isEmpty = (/** @type {string} */ name) => [undefined, null, ""].includes(action?.[name]);
    const missing = required.filter((name) => isEmpty(name) && name in (example ?? {}));
    return { ...action, ...Object.fromEntries(missing.map((name) => [name, example[name]])) };
  }

  /** @param {string} field */
  #chat(field) {
    /** @type {Chat} */
    const chat = new Chat(this.episode, {
      field,
      onChange: (text) => this.#source({ [field]: text }),
      send: async (text) => {
        if (!this.player.isFree || this.episode.session.state === "lost") return false;
        const action = { [field]: text };
        const { reply, error } = await this.player.step(action, this.page.is_chat ? { message: text } : { action });
        if (error?.status === 422)
          chat.showProblem(error.problems.map((/** @type {any} */ problem) => problem.msg).join(" ") || error.message);
        return reply !== null && !error;
      },
    });
    return chat;
  }

  #assemble() {
    const rewards = el(
      "section.card.rewards",
      {},
      el("div.card-head", {}, el("h2", {}, "Rewards"), this.total),
      this.plot.node,
    );
    const last = el("section.card.last", {}, el("h2", {}, "Last steps"), this.latest);
    const seen = el(
      "section.card.seen",
      {},
      el("div.card-head", {}, el("h2", {}, "Observation"), this.badges, this.observation.toggle),
      this.empty,
      this.observation.node,
      this.state.node,
    );
    if (this.chat) {
      const right = el("div.main", {}, this.notices.node, this.chat.node, seen);
      return el("div.columns", {}, el("div.side", {}, rewards, this.python.node), right);
    }
    const left = el("div.side", {}, this.action.node, this.python.node);
    const right = el("div.main", {}, this.notices.node, seen, el("div.pair-of-cards", {}, rewards, last));
    return el("div.columns", {}, left, right);
  }

  #emptyNode() {
    const canAct = this.page.role !== "observer";
    const begin = el(
      "button.primary",
      { type: "button", on: { click: () => this.header.reset() } },
      icon("play"),
      "Start an episode",
    );
    const draws = shapeOf(this.header.schema.properties?.render ?? {}, this.header.schema).kind === "boolean";
    const draw = el(
      "button",
      { type: "button", on: { click: () => this.header.resetWith({ render: true }) } },
      icon("eye"),
      "Start with pictures",
    );
    return el(
      "div.empty",
      {},
      el("h3", {}, "No episode yet"),
      el(
        "p",
        {},
        canAct
          ? "Reset begins one. Then choose an action and step; the observation appears here."
          : "Your token is read-only. The Sessions tab shows open sessions.",
      ),
      canAct && el("div.actions", {}, begin, draws && draw),
    );
  }

  #draw() {
    const { episode } = this;
    const hasOne = episode.isReset || episode.log.length > 0 || episode.observation !== null;
    this.empty.hidden = hasOne;
    this.observation.node.hidden = !hasOne;
    this.observation.toggle.hidden = !hasOne;
    this.state.node.hidden = !hasOne;
    if (hasOne) this.observation.show(episode.observation, episode.render.html);
    this.#drawBadges(hasOne);
    if (this.written !== episode.seed) this.refreshSource();
    this.chat?.setFree(this.player.isFree);
    const key = `${episode.episodeId} ${episode.stepCount} ${episode.happenings}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const { steps } = episode;
    this.plot.show(steps, episode.total);
    this.#drawLatest(steps.slice(-LAST_STEPS).reverse());
    this.total.textContent = steps.length ? `total ${formatNumber(episode.total)}` : "";
    this.state.refresh();
  }

  /** @param {boolean} hasOne */
  #drawBadges(hasOne) {
    const { episode } = this;
    const { observation } = episode;
    const why = observation?.terminated ? "terminated" : observation?.truncated ? "truncated" : "";
    const { done, reward } = episode;
    const kind = outcomeKind({ done, reward, truncated: observation?.truncated, terminated: observation?.terminated });
    const { seed } = episode;
    const text = JSON.stringify([hasOne, episode.stepCount, episode.reward, episode.done, why, seed]);
    if (text === this.badgeText) return;
    this.badgeText = text;
    const sign = Number(episode.reward) < 0 ? ".is-negative" : Number(episode.reward) > 0 ? ".is-positive" : "";
    fill(
      this.badges,
      hasOne && el("span.badge", {}, `step ${episode.stepCount}`),
      hasOne && seed !== null && el("span.badge", { title: "A reset with this seed begins the same episode" }, `seed ${seed}`),
      hasOne && episode.reward !== null && el(`span.badge${sign}`, {}, `reward ${formatReward(episode.reward)}`),
      hasOne && episode.done && outcomeBadge(kind, { text: why ? `done · ${why}` : "done" }),
    );
  }

  /** @param {import("./episode.js").StepEntry[]} steps */
  #drawLatest(steps) {
    if (steps.length === 0) return fill(this.latest, el("li.hint", {}, "No step yet."));
    fill(
      this.latest,
      steps.map((entry) =>
        el(
          "li",
          {},
          el("span.number", {}, entry.step_count),
          el("span.what", {}, briefAction(entry.action)),
          el("span.number", {}, formatReward(entry.reward)),
        ),
      ),
    );
  }
}
