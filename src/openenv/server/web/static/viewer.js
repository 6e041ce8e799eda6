/**
 * The page of `openenv view`: lets the visitor in, and shows rollouts.
 */

import { ApiError, api } from "./api.js";
import { el, fill } from "./element.js";
import { refusal, showLogin, tokenFromAddress } from "./login.js";
import { Rollouts } from "./rollouts.js";
import { namePlate } from "./theme.js";

const place = /** @type {HTMLElement} */ (document.querySelector("#app"));

/** Show rollouts; ask for a token where that is needed. */
async function start() {
  const token = tokenFromAddress();
  let message = "";
  if (token !== null) {
    await api.login(token).catch((error) => {
      message = refusal(error);
    });
  }
  try {
    const page = await api.page();
    if (message !== "") showLogin(place, { message, onDone: start });
    else show(page);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401 || error.status === 403) {
      showLogin(place, { message: error.status === 401 ? message : refusal(error), onDone: start });
    } else {
      fill(place, el("main.centre", { id: "content" }, el("p", { role: "alert" }, error.message)));
    }
  }
}

/** @param {any} page */
function show(page) {
  const rollouts = new Rollouts({
    refused: (error) => {
      if (!(error instanceof ApiError) || (error.status !== 401 && error.status !== 403)) return false;
      rollouts.show(false);
      showLogin(place, { message: error.status === 401 ? "" : refusal(error), onDone: start });
      return true;
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
