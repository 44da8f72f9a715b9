package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// oneSided returns the settings of two agents that read each other's memory by Mooncake's engine
// over TCP.
func oneSided(t *testing.T) []string {
	t.Helper()
	source, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PYTHONPATH", source)
	return append(sharedKey(t), "--peer-rdma", "tcp?host=127.0.0.1&python="+servertest.MooncakePython(t))
}

// up waits until both agents can read each other's memory.
func (n *twoNodes) up() {
	n.t.Helper()
	for _, dir := range []string{n.pDir, n.dDir} {
		pooltest.Until(n.t, "one-sided reads", func() bool { return statusOf(n.t, dir).Peers.Reads.State == "up" })
	}
}

// The decode engine's agent reads the blocks out of the other agent's memory, and both say so.
func TestFetchByOneSidedReads(t *testing.T) {
	n := startTwoPeers(t, oneSided(t))
	n.up()
	n.save(8)
	n.until("all blocks arrive", hitOf(8))
	if r := statusOf(t, n.dDir).Peers.Reads; r.Blocks != 8 || r.Failed != 0 || r.Protocol != "tcp" {
		t.Errorf("%+v", r)
	}
	pooltest.Until(t, "the pins' end", func() bool {
		r := statusOf(t, n.pDir).Peers.Reads
		return r.Placed == 8 && r.Pinned == 0
	})
	out, code := kvagentOutput(t, "status", "--socket-dir", n.dDir)
	if want := "one-sided reads (tcp): up, 8 blocks (32.0 KiB) read, 0 reads failed"; code != 0 ||
		!strings.Contains(out, want) {
		t.Errorf("status, exit code %d, without %q: %s", code, want, out)
	}
}

// An agent whose machine lacks what reads need says why, and fetches as without them.
func TestOneSidedReadsAreNotThere(t *testing.T) {
	n := startTwoPeers(t, append(sharedKey(t), "--peer-rdma", "rdma?host=127.0.0.1&python=/nowhere/python3"))
	n.save(8)
	n.until("all blocks arrive", hitOf(8))
	r := statusOf(t, n.dDir).Peers.Reads
	if r.State != "down" || !strings.Contains(r.Error, "/nowhere/python3") || r.Blocks != 0 {
		t.Errorf("%+v", r)
	}
}

// The other agent stands still, and its helper with it, or only its helper is killed: the fetch
// ends within its bound or goes on in frames, and nothing stays pinned or reserved.
func TestOneSidedReadsFromALostAgent(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: several nodes")
	}
	t.Run("killed", func(t *testing.T) {
		n := startTwoPeers(t, oneSided(t))
		n.up()
		n.save(4)
		n.until("the blocks that were saved arrive", pendingWith(4))
		if err := n.prefill.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		n.until("the wait ends", hitOf(4))
		if st := statusOf(t, n.dDir); st.Pool.Pinned != 0 || st.Pool.Partial != 0 {
			t.Errorf("%d bytes pinned, %d entries partial", st.Pool.Pinned, st.Pool.Partial)
		}
	})
	t.Run("only its helper", func(t *testing.T) {
		n := startTwoPeers(t, oneSided(t))
		n.up()
		devicetest.Freeze(t, helperOf(t, n.prefill.Process.Pid))
		n.save(8)
		n.until("all blocks arrive", hitOf(8))
		if r := statusOf(t, n.dDir).Peers.Reads; r.Blocks != 0 || r.Failed == 0 {
			t.Errorf("%+v", r)
		}
		if st := statusOf(t, n.dDir); st.Pool.Pinned != 0 || st.Pool.Partial != 0 {
			t.Errorf("%d bytes pinned, %d entries partial", st.Pool.Pinned, st.Pool.Partial)
		}
		pooltest.Until(t, "the pins' end", func() bool { return statusOf(t, n.pDir).Peers.Reads.Pinned == 0 })
	})
}

// helperOf returns the process of an agent's helper for reads.
func helperOf(t *testing.T, agent int) int {
	t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", agent))
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		text, _ := os.ReadFile(list) // of a thread that has ended: empty
		for pid := range strings.FieldsSeq(string(text)) {
			line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
			number, err := strconv.Atoi(pid)
			if err == nil && strings.Contains(string(line), "kvagent.mooncake_reads") {
				return number
			}
		}
	}
	t.Fatal("the agent has no helper")
	return 0
}
