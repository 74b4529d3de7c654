// Asks kvd, with the token of this tab where one is needed.

const KEPT = "kvd-token";
export const TIMEOUT_MS = 10000; // longest wait for an answer

export class Refused extends Error {} // a token is needed, or another one

export function setToken(token) {
  if (token) sessionStorage.setItem(KEPT, token);
  else sessionStorage.removeItem(KEPT);
}

// Returns fetch's response. Raises Refused for 401, and for 403 where a page is asking by itself.
export async function send(path, options = {}) {
  const headers = { ...options.headers };
  const token = sessionStorage.getItem(KEPT);
  if (token) headers.authorization = `Bearer ${token}`;
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  return await fetch(path, { signal, ...options, headers, cache: "no-store" });
}

// Returns what a GET answers, read as JSON; raises for anything but 200.
export async function read(path, options = {}) {
  const answer = await send(path, options);
  if (answer.ok) return await answer.json();
  const said = await answer.json().catch(() => ({}));
  const why = typeof said.error === "string" ? said.error
      : (said.error?.message ?? answer.statusText);
  if (answer.status === 401 || answer.status === 403) throw new Refused(why);
  throw Object.assign(new Error(`${answer.status} ${why}`), { status: answer.status });
}
