/**
 * The filters of the list of rollouts: what they are set to is the list's address.
 */

import { el, fill, uniqueId } from "./element.js";

const STATUSES = ["ok", "policy_failed", "truncated", "env_failed", "sandbox_failed", "grader_failed", "cancelled"];
const AGES = { "": "any time", "1h": "last hour", "1d": "last day", "7d": "last week", "30d": "last 30 days" };
const SECONDS = { h: 3600, d: 86_400 };
const ORDERS = {
  "": "newest first",
  oldest: "oldest first",
  reward: "highest reward",
  turns: "most turns",
  tokens: "most tokens",
  wall_s: "longest",
};
const KEPT = [
  ...["text", "task", "group", "agent", "model", "environment", "policy_version", "status"],
  ...["min_trust", "verdict", "store", "order"],
];
const FIRST = ["task", "status", "agent", "model", "age", "order"];
const NUMBERS = ["min_reward", "max_reward"];

/** A row of fields. */
export class RolloutFilters {
  /** @param {(query: URLSearchParams) => void} onChange */
  constructor(onChange) {
    this.onChange = onChange;
    this.timer = 0;
    this.fields = {
      text: input("search", "Search", { placeholder: "id, task, reason" }),
      task: input("text", "Task", {}, true),
      group: input("text", "Group", {}, true),
      agent: select("Agent", { "": "any" }),
      model: select("Model", { "": "any" }),
      environment: select("Environment", { "": "any" }),
      policy_version: select("Policy version", { "": "any" }),
      status: select("Status", { "": "any", ...Object.fromEntries(STATUSES.map((name) => [name, name])) }),
      min_trust: select("Trust at least", { "": "any", isolated: "isolated", judged: "judged" }),
      min_reward: input("number", "Reward from", { step: "any" }),
      max_reward: input("number", "to", { step: "any" }),
      age: select("Stored", AGES),
      from: input("date", "Since", {}),
      to: input("date", "Until", {}),
      verdict: select("Verdict", { "": "first", last: "last" }),
      order: select("Order", ORDERS),
      store: select("Store", {}),
    };
    // On a phone the list would begin below the first screen.
    const isNarrow = matchMedia("(max-width: 760px)").matches;
    const shown = ["store", "text", ...(isNarrow ? [] : FIRST)];
    this.deep = new Set(Object.keys(this.fields).filter((name) => !shown.includes(name)));
    const deep = Object.entries(this.fields).filter(([name]) => this.deep.has(name));
    this.clear = el("button.small", { type: "button", on: { click: () => this.reset() } }, "Clear");
    this.more = el(
      "details.fold.filters-more",
      {},
      el("summary", {}, "More filters"),
      el(
        "div.filters",
        {},
        deep.map(([, field]) => field.node),
      ),
    );
    const first = shown.map((name) => this.fields[/** @type {keyof typeof this.fields} */ (name)].node);
    this.node = el(
      "form.filters-box",
      { role: "search", "aria-label": "Filter rollouts" },
      el("div.filters", {}, first, this.clear),
      this.more,
    );
    this.node.addEventListener("submit", (event) => event.preventDefault());
    for (const { control } of Object.values(this.fields)) {
      const isTyped = control.tagName === "INPUT";
      control.addEventListener(isTyped ? "input" : "change", () => this.#changed(isTyped ? 250 : 0));
    }
  }

  /** What the list's address has: only what is set. */
  get query() {
    const query = new URLSearchParams();
    for (const [name, { control }] of Object.entries(this.fields)) {
      const value = control.value.trim();
      if (value !== "") query.set(name, value);
    }
    return query;
  }

  /** Show what an address asks for. @param {URLSearchParams} query */
  set query(query) {
    let isDeep = false;
    for (const [name, { control }] of Object.entries(this.fields)) {
      const value = query.get(name) ?? "";
      if (control.tagName === "SELECT" && value !== "" && !hasOption(control, value)) {
        control.append(el("option", { value }, value));
      }
      if (control.tagName === "SELECT" && value === "" && !hasOption(control, "")) control.selectedIndex = 0;
      else control.value = value;
      isDeep ||= value !== "" && this.deep.has(name);
    }
    if (isDeep) this.more.open = true;
  }

  /** What the server is asked for; relative times are made absolute. */
  get request() {
    const { query } = this;
    const request = new URLSearchParams();
    for (const name of [...KEPT, ...NUMBERS]) if (query.get(name)) request.set(name, String(query.get(name)));
    const age = query.get("age");
    const [, count, unit] = /^(\d+)([hd])$/.exec(age ?? "") ?? [];
    const since = count
      ? Date.now() / 1000 - Number(count) * SECONDS[/** @type {"h" | "d"} */ (unit)]
      : dayOf(query.get("from"));
    const until = dayOf(query.get("to"), 1);
    if (since !== null) request.set("since", String(since));
    if (until !== null) request.set("until", String(until));
    return request;
  }

  /** Offer what there is. @param {{stores: string[], names: Record<string, [string, number][]>}} known */
  offer({ stores, names }) {
    const { query } = this;
    for (const name of /** @type {const} */ (["agent", "model", "environment", "policy_version"])) {
      const options = names[name].filter(([value]) => value !== "");
      fill(
        this.fields[name].control,
        el("option", { value: "" }, "any"),
        options.map(([value, count]) => el("option", { value }, `${value} (${count})`)),
      );
    }
    for (const name of ["task", "group"]) {
      const { choices } = this.fields[/** @type {"task" | "group"} */ (name)];
      if (choices)
        fill(
          choices,
          names[name].map(([value, count]) => el("option", { value }, `${count}`)),
        );
    }
    const later = names.verdict.map(([value]) => value).filter((value) => value !== "first");
    const verdicts = { "": "first", last: "last", ...Object.fromEntries(later.map((value) => [value, value])) };
    fill(
      this.fields.verdict.control,
      Object.entries(verdicts).map(([value, text]) => el("option", { value }, text)),
    );
    fill(
      this.fields.store.control,
      stores.map((value, index) => el("option", { value: index === 0 ? "" : value }, value)),
    );
    this.fields.store.node.hidden = stores.length < 2;
    this.query = query;
  }

  /** Remove all filters. */
  reset() {
    const store = this.fields.store.control.value;
    this.query = new URLSearchParams(store ? { store } : {});
    this.#changed(0);
  }

  /** @param {number} wait */
  #changed(wait) {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.onChange(this.query), wait);
  }
}

/** @param {any} control @param {string} value */
function hasOption(control, value) {
  return [...control.options].some((option) => option.value === value);
}

/** @param {string | null} date @param {number} [days] - To add. */
function dayOf(date, days = 0) {
  const found = /^(\d{4})-(\d\d)-(\d\d)$/.exec(date ?? "");
  if (!found) return null;
  return new Date(Number(found[1]), Number(found[2]) - 1, Number(found[3]) + days).getTime() / 1000;
}

/** @param {string} type @param {string} label @param {Record<string, any>} properties @param {boolean} [hasChoices] */
function input(type, label, properties, hasChoices = false) {
  const id = uniqueId("filter");
  const choices = hasChoices ? el("datalist", { id: `${id}-choices` }) : null;
  const list = choices ? `${id}-choices` : null;
  const control = el("input", { type, id, list, autocomplete: "off", ...properties });
  const node = el("div.filter", {}, el("label.field-label", { for: id }, label), control, choices);
  return { node, control, choices };
}

/** @param {string} label @param {Record<string, string>} options */
function select(label, options) {
  const id = uniqueId("filter");
  const control = el(
    "select",
    { id },
    Object.entries(options).map(([value, text]) => el("option", { value }, text)),
  );
  return { node: el("div.filter", {}, el("label.field-label", { for: id }, label), control), control, choices: null };
}
