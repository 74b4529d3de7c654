// Sends requests to kvd, with the token of this tab if it has one.

const KEPT = "kvd-token";
export const TIMEOUT_MS = 10000; // longest wait for an answer

export class Refused extends Error {} // kvd wants a token, or another one

export function setToken(token) {
  if (token) sessionStorage.setItem(KEPT, token);
  else sessionStorage.removeItem(KEPT);
}

// Returns fetch's response, whatever its status.
export async function send(path, options = {}) {
  const headers = { ...options.headers };
  const token = sessionStorage.getItem(KEPT);
  if (token) headers.authorization = `Bearer ${token}`;
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  return await fetch(path, { signal, ...options, headers, cache: "no-store" });
}

// Returns the JSON that a GET answers; raises Refused for 401 and 403, Error for other failures.
export async function read(path, options = {}) {
  const answer = await send(path, options);
  if (answer.ok) return await answer.json();
  const said = await answer.json().catch(() => ({}));
  const why = typeof said.error === "string" ? said.error
      : (said.error?.message ?? answer.statusText);
  if (answer.status === 401 || answer.status === 403) throw new Refused(why);
  throw Object.assign(new Error(`${answer.status} ${why}`), { status: answer.status });
}
