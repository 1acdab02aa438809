// Run checks by name, one after the other: a line of JSON each, with the error of one that fails or takes too long.
export async function runChecks(checks, mostMs = Infinity) {
  for (const [name, check] of Object.entries(checks)) {
    let error = null;
    let timer;
    const late = new Promise((_, no) => {
      if (mostMs < Infinity) timer = setTimeout(() => no(new Error(`no end after ${mostMs / 1000} s`)), mostMs);
    });
    try {
      await Promise.race([check(), late]);
    } catch (raised) {
      error = (String(raised?.message ?? raised) || "failed").slice(0, 500);
    } finally {
      clearTimeout(timer);
    }
    console.log(JSON.stringify({ name, error }));
  }
}
