/**
 * Logging in: a token by hand, or from the address's fragment, which is never sent and is removed at once.
 */

import { ApiError, api } from "./api.js";
import { el, fill } from "./element.js";

/** Take the token out of the address. @returns {string | null} */
function tokenFromAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const token = parameters.get("token");
  if (token === null) return null;
  parameters.delete("token");
  const rest = parameters.toString();
  history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
  return token;
}

/**
 * Say in words why a login was refused.
 * @param {ApiError} error
 */
function refusal(error) {
  if (error.status === 401) return "Unknown token.";
  if (error.status === 403)
    return "This token belongs to an agent. Agents may call tools, but not see rewards or states.";
  return error.message;
}

/**
 * Load the page's description and show the page; ask for a token if the server wants one.
 * @param {HTMLElement} place
 * @param {object} options
 * @param {(page: any) => void} options.show
 * @param {(error: ApiError) => void} options.fail - There is nothing to show, and a token does not help.
 */
export async function letIn(place, { show, fail }) {
  const onDone = () => letIn(place, { show, fail });
  const token = tokenFromAddress();
  let message = "";
  if (token !== null) {
    await api.login(token).catch((error) => {
      message = refusal(error);
    });
  }
  try {
    const page = await api.page();
    if (message === "") show(page);
    else showLogin(place, { message, onDone });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (!askForToken(place, error, { message, onDone })) fail(error);
  }
}

/**
 * Ask for a token if an error is about the visitor and not the call; return whether it is.
 * @param {HTMLElement} place
 * @param {any} error
 * @param {object} options
 * @param {string} [options.message] - Shown if a token is missing.
 * @param {() => void} options.onDone
 */
export function askForToken(place, error, { message = "", onDone }) {
  if (!isAboutVisitor(error)) return false;
  showLogin(place, { message: error.status === 401 ? message : refusal(error), onDone });
  return true;
}

/** Whether an error means that a token is missing or may not see the page. @param {any} error */
export function isAboutVisitor(error) {
  return error instanceof ApiError && (error.status === 401 || error.status === 403);
}

/**
 * Ask for a token until one is good.
 * @param {HTMLElement} place
 * @param {object} options
 * @param {string} [options.message]
 * @param {() => void} options.onDone
 */
function showLogin(place, { message = "", onDone }) {
  const problem = el("p.field-error", { id: "login-error", role: "alert", hidden: message === "" }, message);
  const input = el("input", {
    id: "login-token",
    type: "password",
    autocomplete: "current-password",
    "aria-describedby": "login-error",
    required: true,
  });
  const button = el("button.primary", { type: "submit" }, "Log in");
  const form = el(
    "form.card.login",
    {},
    el("h1", {}, "This environment requires a token"),
    el("p.hint", {}, "Ask the operator of the server for it. This browser stores it until you log out."),
    el("label.field-label", { for: "login-token" }, "Token"),
    input,
    problem,
    button,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    problem.hidden = true;
    button.disabled = true;
    try {
      await api.login(input.value.trim());
      onDone();
    } catch (error) {
      problem.textContent = refusal(/** @type {ApiError} */ (error));
      problem.hidden = false;
      input.select();
    } finally {
      button.disabled = false;
    }
  });
  fill(place, el("main.centre", { id: "content" }, form));
  input.focus();
}
