/** Devices, how they are connected, and what `bench` has measured. */

import { PageView } from "./page_view.js";

/** Page #/machine. */
export class MachinePage extends PageView {
  title = "Machine";

  constructor(app) {
    super(app, "/api/machine");
  }
}
