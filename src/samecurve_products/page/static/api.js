/** Requests to the server, their errors in the user's words, and polling. */

/** An answer that is an error. errors: [{cause, remedy, where, key?}], at least one. */
export class ApiError extends Error {
  constructor(status, errors) {
    super(errors[0].cause);
    this.status = status;
    this.errors = errors;
  }

  /** Cause and remedy of the first error as one text. */
  get words() {
    const { cause, remedy } = this.errors[0];
    return remedy ? `${cause}: ${remedy}` : cause;
  }
}

/** GET a path; returns the answer's JSON. */
export function read(path, { signal } = {}) {
  return request(path, { signal });
}

/** POST a body (or another method); returns the answer's JSON. */
export function write(path, body = {}, { method = "POST", signal } = {}) {
  const headers = { "Content-Type": "application/json", "X-Samecurve": "1" };
  return request(path, { method, headers, body: JSON.stringify(body), signal });
}

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, [{ cause: "The server does not answer",
      remedy: "is `samecurve ui` still running, and the SSH tunnel open? Runs go on without it" }]);
  }
  const content = await answer.json().catch(() => null);
  if (answer.ok && content !== null) return content;
  if (answer.status === 401) document.dispatchEvent(new Event("signed-out"));
  const errors = content?.errors?.length ? content.errors : [{
    cause: `The server answered with status ${answer.status}`, remedy: "" }];
  throw new ApiError(answer.status, errors);
}

/**
 * One request after the other as long as a page is shown.
 *
 * task(signal): does one request; returns the milliseconds until the next one.
 * A hidden tab asks nothing. failed(error or null): told of each failure, and when it is over.
 */
export class Poller {
  constructor(task, failed) {
    this.task = task;
    this.failed = failed;
    this.wake = () => {
      if (!document.hidden) this.now();
    };
  }

  start() {
    this.running = true;
    document.addEventListener("visibilitychange", this.wake);
    return this.now();
  }

  stop() {
    this.running = false;
    clearTimeout(this.timer);
    this.abort?.abort();
    document.removeEventListener("visibilitychange", this.wake);
  }

  /** Ask now rather than later. */
  async now() {
    clearTimeout(this.timer);
    if (this.busy || !this.running) return;
    this.busy = true;
    let wait = 5000;
    try {
      this.abort = new AbortController();
      wait = await this.task(this.abort.signal);
      if (this.running) this.failed(null);
    } catch (error) {
      if (!this.running) return;
      if (!(error instanceof ApiError)) console.error(error);
      wait = error.status === 404 || error.status === 401 ? Infinity : 3000;
      this.failed(error);
    } finally {
      this.busy = false;
    }
    if (this.running && !document.hidden && Number.isFinite(wait)) {
      this.timer = setTimeout(() => this.now(), Math.max(500, wait));
    }
  }
}
