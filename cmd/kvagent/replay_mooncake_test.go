package main

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool/servertest"
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

// A pool much smaller than the trace, a small disk, and Mooncake below, every byte checked; also when agent and engines are killed, and with the agent its helper and segment.
func TestReplayOverMooncake(t *testing.T) {
	figures(t)
	spec, _ := startMooncake(t)
	disk := "disk:" + filepath.Join(t.TempDir(), "disk") + "?capacity=64MiB"
	flags := []string{"--requests", "300", "--pace", "6s", "--pool", "24MiB", "--engine-blocks", "600", "--tier", disk, "--tier", spec}
	patient := append(append([]string{"--tiers-within", "60s"}, patientEngines...), flags[:len(flags)-1]...)
	mooncakeShares(t, func() bool {
		o := replayJSON(t, append(patient, spec+"&"+patientTier)...)
		o.clean(t)
		t.Logf("from %+v", o.Sources)
		return o.from("mooncake") >= 50
	})
	o := replayJSON(t, append(flags, "--kill-agent-every", "100", "--kill-engine-every", "60")...)
	o.clean(t)
	if o.AgentKills == 0 || o.EngineKills == 0 {
		t.Errorf("%d agents and %d engines were killed", o.AgentKills, o.EngineKills)
	}
}

// What one node saved the other hits.
func TestReplayTwoNodesOverMooncake(t *testing.T) {
	figures(t)
	mooncakeShares(t, func() bool {
		spec, _ := startMooncake(t)
		o := replayJSON(t, append(patientEngines, "--tiers-within", "60s", "--requests", "300", "--pace", "6s", "--nodes", "2", "--shared", spec+"&"+patientTier)...)
		o.clean(t)
		t.Logf("%d blocks were another node's, from %+v", o.BlocksHitOther, o.Sources)
		return o.from("mooncake") >= 200 && o.BlocksHitOther > 0
	})
}

// mooncakeShares wants one of three runs to say that it got enough. Beside two busy loops Mooncake's clients get next to no processor time between their many
// threads, and move 0 to 70 of 372 blocks in a run, at nice 10 of the loops, too; with nothing beside them all.
func mooncakeShares(t *testing.T, run func() (enough bool)) {
	t.Helper()
	for range 3 {
		if run() {
			return
		}
	}
	t.Error("too few blocks came from mooncake in three runs")
}

// A master that stops for a while, and then dies, costs hits and nothing else.
func TestReplayMooncakeStops(t *testing.T) {
	spec, master := startMooncake(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		time.Sleep(time.Second) // into the run
		master.Pause()
		time.Sleep(time.Second)
		master.Resume()
		time.Sleep(time.Second)
		master.Kill()
	}()
	defer func() { <-done }()
	o := replayJSON(t, "--requests", "300", "--pace", "4s", "--pool", "24MiB", "--engine-blocks", "600", "--tier", spec+"&fetch-within=300ms&rpc-within=100ms")
	o.clean(t)
	if o.Requests != 300 {
		t.Errorf("%d requests of 300", o.Requests)
	}
}

func TestMooncakeSpecs(t *testing.T) {
	for spec, want := range map[string]string{
		"mooncake://h:1?segment=0&soft-pin=0s&master=etcd://a:1%3Bb:2": "",
		"mooncake://h:1?metadata=http://h:8080/metadata":               "",
		"mooncake://h:1?protocol=smoke":                                "allowed: tcp, rdma",
		"mooncake://h:1?segment=17TiB":                                 "segment",
		"mooncake://h:1?metadata=redis://u:p@h:1":                      "metadata-file or metadata-env",
		"mooncake://h:1?metadata-env=KV_TEST_NOT_THERE":                "not in the environment",
	} {
		_, err := parseTier(spec)
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", spec, err, want)
		}
	}
}
