package redis

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// TestCluster kills one of three nodes of a cluster: its blocks are missing, the others' are there.
func TestCluster(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a cluster")
	}
	var nodes []*servertest.Server
	var addrs []string
	for range 3 {
		dir := t.TempDir()
		n := servertest.Redis(t, "--cluster-enabled", "yes", "--cluster-config-file", filepath.Join(dir, "nodes.conf"),
			"--cluster-node-timeout", "500",
			"--cluster-require-full-coverage", "no")
		nodes, addrs = append(nodes, n), append(addrs, n.Addr)
	}
	cli(t, append(append([]string{"--cluster", "create"}, addrs...), "--cluster-yes")...)
	s := openOn(t, Options{Addresses: addrs, Mode: Cluster})
	items := append(pooltest.Blocks(0, 60, 1000), pooltest.Block(60, 320<<10))
	pooltest.Until(t, "all nodes serve", func() bool {
		if s.Put(t.Context(), items) != nil {
			return false
		}
		for i := range items {
			if st := items[i].Status; st != pool.OK && st != pool.Exists {
				return false
			}
		}
		return true
	})
	pooltest.Want(t, s, pool.OK, items...)
	nodes[1].Kill()
	there := 0
	pooltest.Until(t, "the nodes that are left are asked", func() bool {
		out := make([]pool.Item, len(items))
		for i := range items {
			out[i] = pool.Item{Key: items[i].Key, Data: make([]byte, len(items[i].Data))}
		}
		if s.Get(t.Context(), out) != nil {
			return false
		}
		there = 0
		for i := range out {
			if out[i].Status == pool.OK {
				there++
				if string(out[i].Data) != string(items[i].Data) {
					t.Fatal("wrong bytes")
				}
			}
		}
		return there > 0
	})
	if there == len(items) {
		t.Error("a node was killed, and nothing is missing")
	}
	t.Logf("%d of %d blocks are left without one of three nodes", there, len(items))
}

// TestSentinel expects a sentinel to name the master.
func TestSentinel(t *testing.T) {
	master := servertest.Redis(t)
	host, port, _ := net.SplitHostPort(master.Addr)
	conf := filepath.Join(t.TempDir(), "sentinel.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, "sentinel monitor kv %s %s 1\n", host, port), 0o600); err != nil {
		t.Fatal(err)
	}
	sentinel := servertest.Sentinel(t, conf)
	s := openOn(t, Options{Addresses: []string{sentinel.Addr}, Mode: Sentinel, MasterName: "kv"})
	pooltest.Put(t, s, pool.OK, pooltest.Block(1, 100))
	direct := openOn(t, Options{Addresses: []string{master.Addr}})
	pooltest.Want(t, direct, pool.OK, pooltest.Block(1, 100))
}

// TestTLS uses a certificate of its own authority; without that authority nothing is sent.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	roots := servertest.Certificate(t, dir)
	addr := servertest.FreeAddr(t)
	_, tlsPort, _ := net.SplitHostPort(addr)
	servertest.Redis(t, "--tls-port", tlsPort, "--tls-cert-file", filepath.Join(dir, "cert.pem"), "--tls-key-file",
		filepath.Join(dir, "key.pem"),
		"--tls-ca-cert-file", filepath.Join(dir, "cert.pem"), "--tls-auth-clients", "no")
	s := openOn(t, Options{Addresses: []string{addr},
		TLS: &tls.Config{RootCAs: roots, ServerName: "localhost", MinVersion: tls.VersionTLS12}})
	pooltest.Put(t, s, pool.OK, pooltest.Block(1, 100))
	stranger, err := Open(Options{Addresses: []string{addr},
		TLS: &tls.Config{ServerName: "localhost", MinVersion: tls.VersionTLS12}})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	pooltest.Until(t, "a refused connection is counted", func() bool { return stranger.count[countDials].Load() > 0 })
	if err := stranger.Put(t.Context(), pooltest.Blocks(0, 1, 1)); err == nil ||
		!strings.Contains(err.Error(), "certificate") {
		t.Errorf("a server of an unknown authority: %v", err)
	}
}

// TestClusterFailsOver kills a master of a cluster that has a replica: the replica takes over, and
// every block is there again.
func TestClusterFailsOver(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a cluster")
	}
	var nodes []*servertest.Server
	var addrs []string
	for range 4 {
		n := servertest.Redis(t, "--cluster-enabled", "yes", "--cluster-config-file",
			filepath.Join(t.TempDir(), "nodes.conf"), "--cluster-node-timeout", "500",
			"--repl-diskless-sync-delay", "0")
		nodes, addrs = append(nodes, n), append(addrs, n.Addr)
	}
	cli(t, append(append([]string{"--cluster", "create"}, addrs[:3]...), "--cluster-yes")...)
	host, port, _ := net.SplitHostPort(addrs[0])
	master := strings.TrimSpace(cli(t, "-h", host, "-p", port, "CLUSTER", "MYID"))
	pooltest.Until(t, "the nodes agree", func() bool {
		return strings.Contains(cli(t, "-h", host, "-p", port, "CLUSTER", "INFO"), "cluster_state:ok")
	})
	cli(t, "--cluster", "add-node", addrs[3], addrs[0], "--cluster-slave", "--cluster-master-id", master)
	s := openOn(t, Options{Addresses: addrs, Mode: Cluster})
	items := pooltest.Blocks(0, 60, 1000)
	pooltest.Until(t, "all nodes serve", func() bool {
		if s.Put(t.Context(), items) != nil {
			return false
		}
		return !slices.ContainsFunc(items, func(it pool.Item) bool {
			return it.Status != pool.OK &&
				it.Status != pool.Exists
		})
	})
	_, replica, _ := net.SplitHostPort(addrs[3])
	size := func(port string) string { return cli(t, "-h", host, "-p", port, "DBSIZE") }
	pooltest.Until(t, "the replica has what its master has", func() bool {
		return strings.Contains(cli(t, "-h", host, "-p", replica, "INFO", "replication"), "master_link_status:up") &&
			size(replica) == size(port)
	})
	nodes[0].Kill()
	pooltest.Until(t, "the replica has taken over", func() bool {
		out := pooltest.Empty(items)
		if s.Get(t.Context(), out) != nil {
			return false
		}
		return !slices.ContainsFunc(out, func(it pool.Item) bool { return it.Status != pool.OK })
	})
	pooltest.Want(t, s, pool.OK, items...)
	pooltest.Until(t, "blocks are stored again", func() bool {
		more := pooltest.Blocks(100, 60, 1000)
		return s.Put(t.Context(), more) == nil &&
			!slices.ContainsFunc(more, func(it pool.Item) bool {
				return it.Status != pool.OK &&
					it.Status != pool.Exists
			})
	})
}

func cli(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("redis-cli", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("redis-cli %v: %v: %s", args, err, out)
	}
	return string(out)
}
