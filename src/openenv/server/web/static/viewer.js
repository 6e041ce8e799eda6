/**
 * The page of `openenv view`: lets the visitor in, and shows rollouts.
 */

import { ApiError, api } from "./api.js";
import { el, fill } from "./element.js";
import { askForToken, isAboutVisitor, letIn } from "./login.js";
import { Rollouts } from "./rollouts.js";
import { namePlate } from "./theme.js";

const place = /** @type {HTMLElement} */ (document.querySelector("#app"));

/** Show rollouts; ask for a token where that is needed. */
function start() {
  const fail = (/** @type {ApiError} */ error) =>
    fill(place, el("main.centre", { id: "content" }, el("p", { role: "alert" }, error.message)));
  letIn(place, { show, fail });
}

/** @param {any} page */
function show(page) {
  const rollouts = new Rollouts({
    refused: (error) => {
      if (isAboutVisitor(error)) rollouts.show(false);
      return askForToken(place, error, { onDone: start });
    },
  });
  const logout = async () => {
    await api.logout().catch(() => {});
    rollouts.show(false);
    start();
  };
  const head = el(
    "header.head",
    {},
    el("div.title", {}, el("h1", {}, "Rollouts")),
    page.asks_for_token && el("button.link", { type: "button", on: { click: logout } }, "Log out"),
  );
  const plate = namePlate({ version: page.openenv_version, docs: page.docs_url });
  fill(place, plate, head, el("main.viewer", { id: "content", tabindex: -1 }, rollouts.node));
  rollouts.show(true);
}

sessionStorage.removeItem("openenv-reloads"); // `boot` counts how often it has tried
start();
