package main

import (
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
	"github.com/kvagent/kvagent/pool/tierspec"
)

// startMooncake starts a master, and gives a tier's spec without options of the stack.
func startMooncake(t *testing.T) (spec string, master *servertest.Server) {
	t.Helper()
	master, python := servertest.Mooncake(t)
	source, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PYTHONPATH", source)
	return "mooncake://" + master.Addr + "?segment=256MiB&python=" + python, master
}

// busyPerProcessor is how many loops a test of Mooncake runs beside itself on each processor, each
// in a session of its own and at its own priority, so that its expectations hold at a known load.
const busyPerProcessor = 2

// busy runs the loops until the test ends.
func busy(t *testing.T) {
	t.Helper()
	for range busyPerProcessor * runtime.NumCPU() {
		loop := exec.Command("sh", "-c", "while :; do :; done")
		loop.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := loop.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = loop.Process.Kill()
			_ = loop.Wait() // it was killed
		})
	}
}

// A pool much smaller than the trace, a small disk, and Mooncake below, every byte checked; also
// when agent and engines are killed, and with the agent its helper and segment.
func TestReplayOverMooncake(t *testing.T) {
	figures(t)
	busy(t)
	spec, _ := startMooncake(t)
	disk := "disk:" + filepath.Join(t.TempDir(), "disk") + "?capacity=64MiB"
	all := []string{"requests: 300", "pace: 6s", "pool: 24MiB", "engine-blocks: 600"}
	o := replayJSON(t, slices.Concat(all, patientEngines, []string{"tiers-within: 60s",
		"tier: " + disk + "," + spec + "&" + patientTier})...)
	o.clean(t)
	if got := o.from("mooncake"); got < 50 {
		t.Errorf("%d blocks came from mooncake beside %d busy loops a processor, want 50 and more: %+v", got,
			busyPerProcessor, o.Sources)
	}
	o = replayJSON(t, append(all, "tier: "+disk+","+spec, "kill-agent-every: 100", "kill-engine-every: 60")...)
	o.clean(t)
	if o.AgentKills == 0 || o.EngineKills == 0 {
		t.Errorf("%d agents and %d engines were killed", o.AgentKills, o.EngineKills)
	}
}

// Blocks saved by one node are hits on the other, as over any shared store, on a machine whose
// processors are busy.
func TestReplayTwoNodesOverMooncake(t *testing.T) {
	figures(t)
	busy(t)
	spec, _ := startMooncake(t)
	o := replayJSON(t, append(patientEngines, "tiers-within: 60s", "requests: 300", "pace: 6s", "nodes: 2",
		"shared: "+spec+"&"+patientTier)...)
	o.clean(t)
	o.sharedBy(t, "mooncake")
	if o.BlocksHitOther == 0 {
		t.Error("no node hit what another saved")
	}
}

// A master that stops for a while, and then dies, costs hits and nothing else.
func TestReplayMooncakeStops(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: stores that are stopped and killed")
	}
	spec, master := startMooncake(t)
	master.Kill() // the replay starts its own
	o := replayJSON(t, "requests: 300", "pace: 4s", "pool: 24MiB", "engine-blocks: 600", "shared: "+spec+"&within=1s",
		"server: exec "+master.Command(), "tiers-within: 1m", "pause-server-every: 80", "pause-for: 1s",
		"kill-server-every: 225", "server-down: 1h")
	o.clean(t)
	if o.Requests != 300 || o.ServerPauses == 0 || o.ServerKills != 1 {
		t.Errorf("%d requests of 300; the master was stopped %d times and killed %d times, and is to die once",
			o.Requests, o.ServerPauses, o.ServerKills)
	}
}

func TestMooncakeSpecs(t *testing.T) {
	for spec, want := range map[string]string{
		"mooncake://h:1?segment=0&replicas=2&master=etcd://a:1%3Bb:2": "",
		"mooncake://h:1?metadata=http://h:8080/metadata":              "",
		"mooncake://h:1?protocol=smoke":                               "allowed: tcp, rdma",
		"mooncake://h:1?segment=17TiB":                                "segment",
		"mooncake://h:1?metadata=redis://u:p@h:1":                     "metadata-file or metadata-env",
		"mooncake://h:1?metadata-env=KV_TEST_NOT_THERE":               "not in the environment",
	} {
		_, err := tierspec.Parse(spec)
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", spec, err, want)
		}
	}
}

// A decode engine's look-ups name a transfer whose blocks another node's agent writes to Mooncake,
// with no other way between the two: they are told to wait, from before the first block is there
// until the last one is, and what was absent a moment ago is asked for again each time.
func TestTransferThroughMooncake(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: several nodes")
	}
	spec, _ := startMooncake(t)
	n := startTwoNodes(t, []string{"--tier", spec, "--tier-state", t.TempDir()},
		[]string{"--tier", spec, "--tier-state", t.TempDir()})
	for _, dir := range []string{n.pDir, n.dDir} {
		pooltest.Until(t, "Mooncake", func() bool { return statusOf(t, dir).Tiers.Tiers[0].Store.State == "ok" })
	}
	n.until("a look-up waits for what was not begun", pendingWith(0))
	n.save(4)
	n.until("a look-up waits for the rest", pendingWith(4))
	n.save(8)
	n.until("all blocks arrive", hitOf(8))
}
