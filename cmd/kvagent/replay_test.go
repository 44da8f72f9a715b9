package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/lab/replay"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/trace/tracetest"
)

const sliceOfTrace = "../../testdata/conversation_1000.jsonl"

// replayed is what --json printed, and how the command ended.
type replayed struct {
	replay.Report
	code int
	text string
}

// scenarioFile writes the settings of a replay, each a line, to a file.
func scenarioFile(t *testing.T, settings ...string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "scenario.yaml")
	if err := os.WriteFile(path, []byte(strings.Join(settings, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// replayJSON runs a scenario on the trace, with a new seed, and reads the object that is printed.
// Every run is judged by what must hold of any.
func replayJSON(t *testing.T, settings ...string) replayed {
	t.Helper()
	return replayTrace(t, sliceOfTrace, settings...)
}

func replayTrace(t *testing.T, trace string, settings ...string) replayed {
	t.Helper()
	seed := strconv.FormatInt(time.Now().UnixNano(), 10)
	cmd := kvagentCommand(t, "replay", "--trace", trace, "--json", "--seed", seed, "--scenario",
		scenarioFile(t, settings...))
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	o := replayed{code: cmd.ProcessState.ExitCode(), text: log.String()}
	if err := json.Unmarshal(out.Bytes(), &o.Report); err != nil {
		t.Fatalf("replay of %v printed no object: %v\n%s%s", settings, err, out.String(), log.String())
	}
	t.Logf("seed %s: %+v", seed, o.Report)
	if o.FailedRequests+o.LeasesLeft+o.RegionsLeft+o.EnginesLeft+o.EngineBlocks != 0 {
		t.Errorf("%d requests failed; left are %d leases, %d mappings, %d engines, %d engine blocks\n%s",
			o.FailedRequests, o.LeasesLeft, o.RegionsLeft, o.EnginesLeft, o.EngineBlocks, o.text)
	}
	return o
}

func (o *replayed) clean(t *testing.T) {
	t.Helper()
	if o.code != 0 || o.WrongBytes != 0 {
		t.Errorf("exit %d, %d wrong bytes\n%s", o.code, o.WrongBytes, o.text)
	}
}

// busyFactor is how many waits that end as late as the machine's own a clean-up may have: an
// engine's end is seen and handled by several processes in turn.
const busyFactor = 10

// cleanedUp holds what is kept of a process that died to be free within two seconds of a machine
// that does not stand still.
func (o *replayed) cleanedUp(t *testing.T) {
	t.Helper()
	if most := 2000 + busyFactor*o.MachineLagUS/1000; o.CleanupMaxMS >= most {
		t.Errorf("the agent kept a dead engine's memory for %.0f ms, allowed: %.0f", o.CleanupMaxMS, most)
	}
}

// Plain: the hit rate is that of the simulation, also where caches and pool are small. The
// simulated pool is LRU. Its look-ups are never late, which are misses.
func TestReplayHitsAsSimulated(t *testing.T) {
	figures(t)
	t.Parallel()
	for _, args := range [][]string{{}, {"pool: 48MiB", "engine-blocks: 600", "eviction: lru"},
		{"engines: 5"}} {
		o := replayJSON(t, slices.Concat([]string{"requests: 500"}, patientEngines, args)...)
		o.clean(t)
		if d := o.HitRate - o.SimHitRate; d < -0.01 || d > 0.01 {
			t.Errorf("%v: hit rate %.4f, the simulation says %.4f", args, o.HitRate, o.SimHitRate)
		}
		if o.BlocksHitOther == 0 {
			t.Errorf("%v: no engine hit a block of another one", args)
		}
	}
}

// A pool that is too small serves more with the default eviction than with LRU, end to end and
// every byte checked. A fresh pool is LRU until its policy has shown something, and an alarm at the
// start makes that longer: the whole trace, 0.117 and 0.058 on a quiet machine.
func TestReplayEvictionGains(t *testing.T) {
	figures(t)
	t.Parallel()
	trace := tracetest.Conversation(t)
	rate := map[string]float64{}
	for _, eviction := range evict.Names {
		o := replayTrace(t, trace, "requests: 12000", "engine-blocks: 512", "block-bytes: 4096", "pool: 10000KiB",
			"eviction: "+eviction)
		o.clean(t)
		rate[eviction] = o.HitRate
	}
	t.Logf("hit rates %v", rate)
	if rate[evict.HazardName] < rate[evict.LRUName]+0.02 {
		t.Errorf("hit rate %.4f with hazard, %.4f with lru, in a pool of 2,500 blocks", rate[evict.HazardName],
			rate[evict.LRUName])
	}
}

// Everything an engine can do, at once, against the real agent.
func TestReplayStorm(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a torture")
	}
	t.Parallel()
	o := replayJSON(t, "requests: 300", "ranks: 2", "groups: 2", "block-bytes: 32768",
		"abort-rate: 0.2", "engine-blocks: 450", "kernel-lag: 200us")
	o.clean(t)
	for name, n := range map[string]int{"aborts": o.AbortedRequests, "preemptions": int(o.Preemptions),
		"loads": int(o.BlocksLoaded), "saves": int(o.BlocksSaved)} {
		if n == 0 {
			t.Errorf("no %s in the whole run", name)
		}
	}
}

// Any process may die or stop at any time, and no request fails.
func TestReplayKills(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a torture")
	}
	t.Parallel()
	o := replayJSON(t, "requests: 400", "ranks: 2", "kill-engine-every: 50", "kill-agent-every: 150",
		"pause-agent-every: 250",
		"pause-for: 1s")
	o.clean(t)
	if o.Requests != 400 {
		t.Errorf("%d requests of 400", o.Requests)
	}
	if o.EngineKills == 0 || o.AgentKills == 0 || o.AgentPauses != 1 {
		t.Errorf("%d engine kills, %d agent kills, %d pauses", o.EngineKills, o.AgentKills, o.AgentPauses)
	}
	if 2*o.KillsInFlight < o.EngineKills+o.AgentKills {
		t.Errorf("%d of %d kills hit a job in flight, half is asked for", o.KillsInFlight, o.EngineKills+o.AgentKills)
	}
	o.cleanedUp(t)
}

// The resources of a process that died are free in time, whichever others died with it, with copies
// in flight or not. Nothing else runs meanwhile.
func TestReplayCleansUp(t *testing.T) {
	figures(t)
	for _, args := range [][]string{
		{"ranks: 2", "kill-engine-every: 50", "kill-agent-every: 150", "pause-agent-every: 250",
			"pause-for: 1s"},
		{"device: host-mover", "kill-engine-every: 60", "kill-agent-every: 250", "kill-mover-every: 25"},
	} {
		o := replayJSON(t, append([]string{"requests: 600"}, args...)...)
		o.clean(t)
		o.cleanedUp(t)
		if o.EngineKills < 5 || o.AgentKills == 0 {
			t.Errorf("%v: %d engines and %d agents were killed", args, o.EngineKills, o.AgentKills)
		}
	}
}

// Many engines at one agent.
func TestReplayManyEngines(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: many engines")
	}
	t.Parallel()
	o := replayJSON(t, "requests: 300", "engines: 32", "engine-blocks: 260")
	o.clean(t)
}

// An engine of many ranks, of which each has a shard of its own: TP 8 x PP 4.
func TestReplayManyRanks(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: many ranks")
	}
	t.Parallel()
	o := replayJSON(t, "requests: 300", "engines: 2", "ranks: 32", "block-bytes: 1KiB",
		"engine-blocks: 260")
	o.clean(t)
	if o.BlocksLoaded == 0 {
		t.Error("nothing was loaded")
	}
}

// For people: progress and a table in which the second engine's hits on the first one's blocks are
// seen.
func TestReplayForPeople(t *testing.T) {
	out, code := kvagentOutput(t, "replay", "--trace", sliceOfTrace, "--requests", "150", "--progress")
	if code != 0 {
		t.Fatalf("exit %d: %s", code, out)
	}
	for _, want := range []string{"150 of 150 requests", "of another engine", "no byte was wrong",
		"The agent stopped cleanly"} {
		if !strings.Contains(out, want) {
			t.Errorf("not in the output: %q\n%s", want, out)
		}
	}
}

func TestReplayRefuses(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.jsonl")
	if err := os.WriteFile(bad, []byte(`{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	trace := []string{"--trace", sliceOfTrace}
	for _, c := range []struct {
		args, settings []string
		want           string
	}{
		{nil, nil, "trace must be given"},
		{[]string{"--trace", bad}, nil, ":1: input_length is 513, must be an integer from 1 to 512 with 1 hash_ids"},
		{[]string{"--trace", sliceOfTrace, "--kvagent", "/nowhere/kvagent"}, nil,
			`kvagent: "/nowhere/kvagent", allowed: a program`},
		{[]string{"--trace", sliceOfTrace, "--socket", "/x"}, []string{"kill-agent-every: 5"}, "neither killed"},
		{trace, []string{"engine-blocks: 10"}, "engine-blocks: 10, allowed: "},
		{trace, []string{"abort-rate: 2"}, `abort-rate: "2", allowed: 0 to 1`},
		{trace, []string{"kill-engines: 2"}, "kill-engines: unknown, allowed: abort-rate, "},
		{trace, []string{"pause-server-every: 5", "shared: redis://h:1"}, "pause-server-every: allowed with server"},
		{trace, []string{"server: redis-server"}, `server: "redis-server", allowed: a command line, with shared`},
		{trace, []string{"pause-engine-every: 5", "pause-for: 4m"},
			"pause-for: 4m0s, allowed: 1ms to less than stalled-after (3m0s)"},
		{trace, []string{"engines: 2", "nodes: 3"}, "nodes: 3, allowed: 1 to 2 (engines)"},
		{trace, []string{"stalled-after: 0s"}, "allowed: 1s to 24h"},
		{trace, []string{"block-bytes: 1056"}, "one must divide the other"},
		{trace, []string{"expect-blocks: disk"}, `expect-blocks: "disk", allowed: a source, = and a number`},
	} {
		args := append([]string{"replay", "--scenario", scenarioFile(t, c.settings...)}, c.args...)
		if out, code := kvagentOutput(t, args...); code != exitConfig || !strings.Contains(out, c.want) {
			t.Errorf("%v, %v: exit %d, want %d and %q\n%s", c.args, c.settings, code, exitConfig, c.want, out)
		}
	}
}

// What a scenario expects and a run does not show fails the run, and names the figure.
func TestReplayMissesWhatIsExpected(t *testing.T) {
	o := replayJSON(t, "requests: 300", "kill-engine-every: 400", "expect-every-fault: true",
		"expect-blocks: [memory=0, any=1000000]")
	for _, want := range []string{"expected: kill-engine at least once", "expected: 1000000 blocks from any, "} {
		if o.code != exitFailed || !strings.Contains(o.text, want) {
			t.Errorf("exit %d, want %d and %q\n%s", o.code, exitFailed, want, o.text)
		}
	}
	if strings.Contains(o.text, "blocks from memory") {
		t.Errorf("what was seen is missed: %s", o.text)
	}
}

// A tier that does not answer is named before a request is dealt; with 0 it is not waited for.
func TestReplayAwaitsItsTiers(t *testing.T) {
	out, code := kvagentOutput(t, "replay", "--trace", sliceOfTrace, "--requests", "20", "--scenario",
		scenarioFile(t, "shared: redis://127.0.0.1:1", "tiers-within: 100ms"))
	if want := "tiers-within: redis does not answer within 100ms"; code != exitFailed || !strings.Contains(out, want) {
		t.Errorf("exit %d, want %d and %q\n%s", code, exitFailed, want, out)
	}
	o := replayJSON(t, "requests: 20", "shared: redis://127.0.0.1:1")
	o.clean(t)
}

// A filler holds its registration until it is ended; its blocks can be asked for in a foreign form.
func TestMockFill(t *testing.T) {
	_, dir, _ := startServe(t)
	file := filepath.Join(t.TempDir(), "hashes")
	if err := os.WriteFile(file, []byte(strings.Repeat("00", 31)+"01\n"+strings.Repeat("00", 31)+"02\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	cmd := kvagentCommand(t, "mock", "--fill", file, "--socket-dir", dir, "--lookup-name", "foreign", "--block-size",
		"128", "--hold")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 0, 256)
	for !bytes.Contains(said, []byte("filled 2\n")) {
		n, err := out.Read(said[len(said):cap(said)])
		if said = said[:len(said)+n]; err != nil {
			t.Fatalf("%v after %q", err, said)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "foreign")); err != nil {
		t.Error(err)
	}
	waitStatus(t, dir, "engines", func(n float64) bool { return n == 1 })
	waitStatus(t, dir, "blocks_stored", func(n float64) bool { return n == 2 })
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("mock --hold ended with %v", err)
	}
}

// The process that has the engines' memory open may die in the middle of a copy, as engines and the
// agent may. Not beside other replays of this package: a mover that starts again needs a processor
// for its two seconds to be about the agent.
func TestReplayMoverKills(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a torture")
	}
	o := replayJSON(t, "requests: 1000", "device: host-mover", "kill-engine-every: 150",
		"kill-agent-every: 400", "kill-mover-every: 60")
	o.clean(t)
	if o.Requests != 1000 || o.MoverKills < 5 {
		t.Errorf("%d requests of 1000, %d mover kills", o.Requests, o.MoverKills)
	}
	if 2*o.MoverInFlight < o.MoverKills {
		t.Errorf("%d of %d movers were killed with a copy in flight, half is asked for", o.MoverInFlight, o.MoverKills)
	}
	o.cleanedUp(t)
}
