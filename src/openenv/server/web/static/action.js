/**
 * The action: buttons of the environment, the form of its schema, and the button that steps.
 *
 * Where actions are calls of tools that are known, the form is a list of tools and the arguments of the chosen one.
 */

import { el, fill, icon } from "./element.js";
import { Form } from "./form.js";
import { Moves, derivedMoves } from "./moves.js";
import { outcomeKind } from "./outcome.js";
import { Progress } from "./progress.js";
import { SUBMIT_KEY } from "./keyboard.js";
import { isRecord, shapeOf } from "./schema.js";

/** The card that acts. */
export class ActionCard {
  list = el("select", { id: "tool-picker", on: { change: () => this.#choose(this.list.value) } });
  toolAbout = el("p.field-help");
  over = el("p.over", { hidden: true });
  /** The buttons of the running episode; when it is over they stay, and cannot be pressed. */
  offered = /** @type {import("./episode.js").Offered[]} */ ([]);

  /**
   * @param {any} page
   * @param {import("./player.js").Player} player
   * @param {(action: any) => void} onChange - Called with what would be sent.
   */
  constructor(page, player, onChange) {
    this.page = page;
    this.player = player;
    this.onChange = onChange;
    const { schema } = page.action;
    this.derived = derivedMoves(schema);
    this.tools = isToolCall(schema) && page.tools?.length ? page.tools : null;
    /** @type {Map<string, Form>} */
    this.toolForms = new Map();
    this.form = this.tools
      ? this.#toolForm(this.tools[0])
      : new Form(schema, {
          label: "Action",
          hints: hintsOf(page),
          onChange: () => this.notify(),
          onSubmit: () => this.submit(),
        });
    this.moves = new Moves((action) => this.act(action));
    this.button = el(
      "button.primary.step",
      { type: "button", title: `${SUBMIT_KEY} + Enter, from anywhere on the page`, on: { click: () => this.submit() } },
      icon("play"),
      "Step",
      el("kbd", { "aria-hidden": "true" }, `${SUBMIT_KEY} ⏎`),
    );
    this.toggle = el("span");
    this.body = el("div");
    const { title, description } = shapeOf(schema, schema).schema;
    this.node = el(
      "section.card.action",
      {},
      el("div.card-head", {}, el("h2", { title: title ?? "" }, "Action"), !this.isDiscrete && this.toggle),
      typeof description === "string" && !this.tools && el("p.about", {}, description),
      this.over,
      this.moves.node,
      !this.isDiscrete && this.#byHand(),
      new Progress(player).node,
    );
    this.#draw();
    player.episode.subscribe(() => this.#update());
  }

  /** Whether the buttons are all that there is to choose; then there is no form beside them. */
  get isDiscrete() {
    return this.derived.length > 0;
  }

  /** The form and its button. */
  #byHand() {
    return el("div.stack.is-tight", {}, this.tools && this.#picker(), this.body, el("div.actions", {}, this.button));
  }

  /** What would be sent now. */
  get value() {
    return this.#whole(this.form.peek());
  }

  /** Report the action that the form holds now. */
  notify() {
    const { value } = this;
    if (isRecord(value)) this.onChange(value);
  }

  /** Send what the form says. */
  async submit() {
    if (this.isDiscrete) return;
    const read = this.form.read();
    if (read) await this.act(this.#whole(read.value));
  }

  /** @param {any} action */
  async act(action) {
    if (!this.player.isFree || this.player.episode.session.state === "lost") return;
    this.onChange(action);
    const { error } = await this.player.step(action);
    if (error?.status !== 422) return;
    if (this.isDiscrete) this.player.episode.setFailure({ message: error.message, code: error.code });
    else this.form.showErrors(error.problems.length ? error.problems : [{ loc: [], msg: error.message }]);
  }

  /** Put an action into the form, or go to its button. @param {any} action */
  write(action) {
    if (this.isDiscrete) return this.moves.focusOn(action);
    const tool = this.tools?.find((/** @type {any} */ tool) => tool.name === action?.tool_name);
    if (this.tools && !tool) return;
    if (tool) this.#choose(tool.name);
    this.form.write(tool ? (action.arguments ?? {}) : action);
  }

  /** @param {any} value */
  #whole(value) {
    return this.tools ? { type: "call_tool", tool_name: this.chosen, arguments: value } : value;
  }

  /** @param {any} tool */
  #toolForm(tool) {
    this.chosen = tool.name;
    const form =
      this.toolForms.get(tool.name) ??
      new Form(tool.input_schema, {
        label: tool.name,
        onChange: () => this.notify(),
        onSubmit: () => this.submit(),
      });
    this.toolForms.set(tool.name, form);
    return form;
  }

  #picker() {
    const options = this.tools.map((/** @type {any} */ tool) => el("option", { value: tool.name }, tool.name));
    fill(this.list, options);
    return el("div.field", {}, el("label.field-label", { for: "tool-picker" }, "Tool"), this.list, this.toolAbout);
  }

  /** @param {string} name */
  #choose(name) {
    this.form = this.#toolForm(this.tools.find((/** @type {any} */ tool) => tool.name === name));
    this.list.value = name;
    this.#draw();
    this.notify();
  }

  #draw() {
    fill(this.body, this.form.node);
    fill(this.toggle, this.form.toggle);
    const tool = this.tools?.find((/** @type {any} */ tool) => tool.name === this.chosen);
    if (tool) this.toolAbout.textContent = (tool.description ?? "").split("\n")[0];
  }

  /** @param {import("./episode.js").Episode} episode */
  #drawOver({ done, reward, observation }) {
    const kind = outcomeKind({ done, reward, truncated: observation?.truncated, terminated: observation?.terminated });
    const text = ENDS[/** @type {keyof typeof ENDS} */ (kind)];
    if (!text || this.over.dataset.outcome === kind) return;
    this.over.dataset.outcome = kind;
    this.over.textContent = `${text} Reset begins a new one.`;
  }

  #update() {
    const { episode, isFree } = this.player;
    const canStep = isFree && episode.session.state !== "lost";
    const { actions } = episode.render;
    if (!episode.done) this.offered = actions.length ? actions : this.derived;
    this.moves.show(this.player.canAct ? this.offered : [], canStep && !episode.done);
    this.over.hidden = !episode.done || !this.player.canAct;
    this.button.setAttribute("aria-disabled", String(!canStep));
    this.button.classList.toggle("is-busy", episode.isBusy);
    this.button.classList.toggle("primary", episode.isReset && !episode.done && episode.session.state !== "lost");
    this.#drawOver(episode);
  }
}

/** How an end is said. */
const ENDS = {
  won: "Episode over, with a reward.",
  lost: "Episode over, without a reward at its end.",
  truncated: "Episode cut off by a limit.",
  done: "Episode over.",
};

/** Whether actions are calls of tools. @param {any} schema */
function isToolCall(schema) {
  const { properties } = shapeOf(schema, schema).schema;
  return properties?.type?.const === "call_tool" && "tool_name" in properties && "arguments" in properties;
}

/** @param {any} page */
function hintsOf(page) {
  return Object.fromEntries((page.action.fields ?? []).map((/** @type {any} */ field) => [field.name, field.type]));
}
