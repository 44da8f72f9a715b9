package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool/peer"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// Settings that contradict each other are refused by name, with what is allowed.
func TestPeerSettingsErrors(t *testing.T) {
	long := strings.Repeat("h", ipc.MaxPeerAddress) + ":1"
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"no proof": {[]string{"--peer-listen", ":7460"}, []string{"peer-listen", "allowed: with one"}},
		"both proofs": {[]string{"--peer-key-file", "k", "--peer-tls-dir", "c"},
			[]string{"peer-key-file", "allowed: a key or"}},
		"no port": {[]string{"--peer-key-file", "k", "--peer-listen", "::"},
			[]string{"peer-listen", `"::"`, "0 to 65535"}},
		"port of 65536": {[]string{"--peer-key-file", "k", "--peer-listen", "h:65536"},
			[]string{"peer-listen", "0 to 65535"}},
		"advertised only": {[]string{"--peer-advertise", "h:1"}, []string{"peer-advertise", "without peer-listen"}},
		"advertised, long": {[]string{"--peer-key-file", "k", "--peer-listen", ":1", "--peer-advertise", long},
			[]string{"peer-advertise", "at most 128 bytes"}},
		"timeout":      {[]string{"--peer-timeout", "1ms"}, []string{"peer-timeout", "allowed: 50ms to 1m0s"}},
		"allow, alone": {[]string{"--peer-allow", "a"}, []string{"peer-allow", "without peer-key-file"}},
		"allow, a port": {[]string{"--peer-key-file", "k", "--peer-allow", "10.0.0.0/8,a:1"},
			[]string{"peer-allow", `"a:1"`, "without ports"}},
		"rdma, alone": {[]string{"--peer-rdma", "rdma"}, []string{"peer-rdma", "without peer-key-file"}},
		"rdma, TLS": {[]string{"--peer-rdma", "rdma", "--peer-tls-dir", "c"},
			[]string{"peer-rdma", "not encrypted"}},
		"rdma, protocol": {[]string{"--peer-rdma", "smoke"}, []string{"peer-rdma", "allowed: rdma, tcp"}},
		"rdma, option":   {[]string{"--peer-rdma", "rdma?device=a"}, []string{"peer-rdma", "allowed: devices, host"}},
		"rdma, devices":  {[]string{"--peer-rdma", "tcp?devices=a"}, []string{"peer-rdma", "allowed: with rdma"}},
		"rdma, a device": {[]string{"--peer-rdma", "rdma?devices=a,,b"}, []string{"peer-rdma", "separated by commas"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := readSettings(t, c.args, nil, "")
			for _, want := range c.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want %q in it", err, want)
				}
			}
		})
	}
}

// A key file that others can read, or that is too short, ends the start with the reason.
func TestPeerKeyFileIsChecked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	for _, c := range []struct {
		bytes int
		mode  os.FileMode
		want  string
	}{{31, 0o600, "31 bytes, allowed: 32 to 4096"}, {32, 0o644, "mode 0600"}} {
		if err := os.WriteFile(path, bytes.Repeat([]byte("k"), c.bytes), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		out, code := kvagentOutput(t, "serve", "--socket-dir", filepath.Join(t.TempDir(), "s"), "--pool", "1MiB",
			"--peer-listen", "127.0.0.1:0", "--peer-key-file", path)
		if code != 2 || !strings.Contains(out, "peer-key-file") || !strings.Contains(out, c.want) {
			t.Errorf("exit code %d, want 2 with %q: %s", code, c.want, out)
		}
	}
}

// twoNodes are two agents in processes of their own, with an engine's worker each.
type twoNodes struct {
	t              *testing.T
	prefill        *exec.Cmd
	pDir, dDir     string
	saves, decodes *testWorker
	look           *mockengine.LookupClient
	address        string // of the prefill engine's agent; empty: it has none
	jobs           uint64
	hashes         []byte
}

// sharedKey returns the setting of a key.
func sharedKey(t *testing.T) []string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, bytes.Repeat([]byte("k"), peer.MinKey), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--peer-key-file", path}
}

// startTwoPeers starts two agents that know each other. The time after which an agent counts as
// dead is longer than a busy machine stands still.
func startTwoPeers(t *testing.T, auth []string) *twoNodes {
	t.Helper()
	return startTwoNodes(t, slices.Concat(auth, []string{"--peer-listen", "127.0.0.1:0"}),
		slices.Concat(auth, []string{"--peer-timeout", "5s"}))
}

func startTwoNodes(t *testing.T, prefill, decode []string) *twoNodes {
	t.Helper()
	n := &twoNodes{t: t, hashes: make([]byte, 8*32)}
	for i := range 8 {
		n.hashes[i*32] = byte(i + 1)
	}
	n.prefill, n.pDir, _ = startServe(t, prefill...)
	_, n.dDir, _ = startServe(t, decode...)
	n.saves, n.decodes = joinWorker(t, n.pDir), joinWorker(t, n.dDir)
	n.look = mockengine.DialLookup(filepath.Join(n.dDir, socketdir.Lookup))
	t.Cleanup(func() { _ = n.look.Close() })
	if p := statusOf(t, n.pDir).Peers; p != nil {
		n.address = p.Address
	}
	return n
}

// save offers a transfer of all blocks, and stores the first of them. It returns when the agent
// knows the offer: only a scheduler's is waited for by who asks for the transfer.
func (n *twoNodes) save(blocks int) {
	n.t.Helper()
	ids := make([]byte, 0, 4*blocks)
	for i := range blocks {
		ids = binary.LittleEndian.AppendUint32(ids, uint32(i))
	}
	n.jobs++
	for _, m := range []any{
		&ipc.Offer{Name: []byte("a"), Tokens: 8 * 16, TTLMS: 300_000},
		&ipc.Save{Job: n.jobs, Epoch: 1, Event: ipc.None, Revoke: ipc.None,
			Sections: []ipc.Section{{HashLen: 32, Hashes: n.hashes[:blocks*32], Blocks: ids}}},
	} {
		if err := n.saves.conn.Send(m); err != nil {
			n.t.Fatal(err)
		}
	}
	pooltest.Until(n.t, "the offer is known", func() bool { return statusOf(n.t, n.pDir).Transfers.Opened > 0 })
}

// until asks for the transfer until the answer is right.
func (n *twoNodes) until(what string, right func(ipc.LookupReply) bool) {
	n.t.Helper()
	q := ipc.LookupRequest{
		Form: ipc.FormOwn, Space: n.decodes.space, Tokens: 8*16 + 1, HashLen: 32, Hashes: n.hashes,
		DeadlineUS: 20_000_000, Transfer: []byte("a"), Peer: n.address,
	}
	pooltest.Until(n.t, what, func() bool {
		got, err := n.look.Ask(&q, 20*time.Second)
		if err != nil {
			n.t.Fatal(err)
		}
		return right(got)
	})
}

func pendingWith(blocks uint32) func(ipc.LookupReply) bool {
	return func(a ipc.LookupReply) bool { return a.Status == ipc.LookupPending && a.Tokens == blocks*16 }
}

func hitOf(blocks uint32) func(ipc.LookupReply) bool {
	return func(a ipc.LookupReply) bool { return a.Status == ipc.LookupHit && a.Tokens == blocks*16 }
}

// The prefill engine's agent is killed, stopped or ended while it is waited for: the decode engine
// gets what has come and waits no more, its agent keeps nothing, and kvagent status says why.
func TestPrefillAgentIsLost(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: several nodes")
	}
	for name, signal := range map[string]syscall.Signal{
		"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP, "ended": syscall.SIGTERM,
	} {
		t.Run(name, func(t *testing.T) {
			n := startTwoPeers(t, sharedKey(t))
			n.save(4)
			n.until("the blocks that were saved arrive", pendingWith(4))
			if err := n.prefill.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			n.until("the wait ends", hitOf(4))
			st := statusOf(t, n.dDir)
			// An agent that is ended may still say that nothing more comes.
			if x := &st.Transfers; x.Fetching != 0 || x.Fetches != 1 || x.FetchesFailed == 0 && name != "ended" {
				t.Errorf("%+v", x)
			}
			if st.Pool.Pinned != 0 || st.Pool.Partial != 0 {
				t.Errorf("%d bytes pinned, %d entries partial", st.Pool.Pinned, st.Pool.Partial)
			}
			out, code := kvagentOutput(t, "status", "--socket-dir", n.dDir)
			want := "from " + n.address + ": open, 0 fetches now"
			if code != 0 || name != "ended" && !strings.Contains(out, want) {
				t.Errorf("status, exit code %d: %s", code, out)
			}
		})
	}
}

// Agents that prove themselves by certificates fetch from each other as those with a key.
func TestFetchOverTLS(t *testing.T) {
	dir := t.TempDir()
	servertest.Certificate(t, dir)
	for name, file := range map[string]string{"tls.crt": "cert.pem", "tls.key": "key.pem", "ca.crt": "cert.pem"} {
		if err := os.Symlink(file, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	n := startTwoPeers(t, []string{"--peer-tls-dir", dir})
	n.save(8)
	n.until("all blocks arrive", hitOf(8))
	if s := statusOf(t, n.pDir).Peers; s.Unauthenticated != 0 || s.Connections == 0 {
		t.Errorf("%+v", s)
	}
}

// An agent frees its peer address with its directory: a successor of the same settings starts at
// once.
func TestPeerAddressIsFreeForASuccessor(t *testing.T) {
	key := sharedKey(t)
	n := startTwoPeers(t, key)
	n.save(8)
	n.until("all blocks arrive", hitOf(8))
	next := kvagentCommand(t, append(key, "--peer-listen", n.address)...)
	next.Args = slices.Insert(next.Args, 1, "serve", "--socket-dir", n.pDir, "--pool", "16MiB")
	log := &processLog{}
	next.Stderr = log
	if err := n.prefill.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = next.Process.Kill() })
	var st admin.Status
	pooltest.Until(t, "the successor's start", func() bool {
		body, err := adminclient.New(n.pDir).Get(t.Context(), "/status")
		return err == nil && json.Unmarshal(body, &st) == nil && st.PID == next.Process.Pid && st.Ready
	})
	if st.Peers.Address != n.address {
		t.Errorf("it is at %q, not at %q", st.Peers.Address, n.address)
	}
	if err := next.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := next.Wait(); err != nil {
		t.Errorf("the successor ends with %v: %s", err, log)
	}
}
