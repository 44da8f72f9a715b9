package redis

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/servertest"
)

// liar is a server that answers like a Redis, a cluster of one node, or a sentinel, but one of its
// answers is something else, and ends the connection.
type liar struct {
	addr   string
	master string // what a sentinel names
	shards bool   // its version is one that the library asks for CLUSTER SHARDS, not SLOTS

	mu     sync.Mutex
	values map[string]string
	honest int // answers before the lie; -1: it has lied
	lie    []byte
}

func newLiar(t testing.TB, honest int, lie []byte) *liar {
	s := &liar{values: map[string]string{}, honest: honest, lie: lie}
	s.addr = servertest.Listen(t, s.serve)
	s.master = s.addr
	return s
}

func (s *liar) serve(nc net.Conn) {
	r := bufio.NewReader(nc)
	for {
		command, err := readCommand(r)
		if err != nil {
			return
		}
		answer, more := s.answer(command)
		if _, err := nc.Write(answer); err != nil || !more {
			return
		}
	}
}

func readCommand(r *bufio.Reader) (command []string, err error) {
	number := func() (n int) {
		var line string
		if line, err = r.ReadString('\n'); err == nil {
			n, err = strconv.Atoi(strings.TrimSpace(line[1:]))
		}
		return n
	}
	for range number() {
		b := make([]byte, number()+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		command = append(command, string(b[:len(b)-2]))
	}
	return command, err
}

// answer returns the answer to a command, and whether another one may follow.
func (s *liar) answer(c []string) (answer []byte, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.honest--; s.honest == -1 {
		return s.lie, false
	}
	s.honest = max(s.honest, -2)
	return []byte(s.truth(c)), true
}

func blob(text string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(text), text) }

func (s *liar) truth(c []string) string {
	host, port, _ := net.SplitHostPort(s.addr)
	switch c[0] {
	case "HELLO":
		version := map[bool]string{false: "7.4.0", true: "8.2.0"}[s.shards]
		return "%3\r\n" + blob("server") + blob("redis") + blob("version") + blob(version) + blob("proto") + ":3\r\n"
	case "SET":
		if _, there := s.values[c[1]]; there && slices.Contains(c, "NX") {
			return "_\r\n"
		}
		s.values[c[1]] = c[2]
	case "GETRANGE":
		to, _ := strconv.Atoi(c[3])
		value := s.values[c[1]]
		return blob(value[:min(to+1, len(value))])
	case "EXISTS", "UNLINK", "PEXPIRE":
		if _, there := s.values[c[1]]; !there {
			return ":0\r\n"
		}
		if c[0] == "UNLINK" {
			delete(s.values, c[1])
		}
		return ":1\r\n"
	case "PING":
		return "+PONG\r\n"
	case "CLUSTER":
		if c[1] == "SHARDS" {
			node := blob("endpoint") + blob(host) + blob("port") + ":" + port + "\r\n" + blob("role") + blob("master") +
				blob("health") + blob("online")
			return "*1\r\n%2\r\n" + blob("slots") + "*2\r\n:0\r\n:16383\r\n" + blob("nodes") + "*1\r\n%4\r\n" + node
		}
		return fmt.Sprintf("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n%s:%s\r\n%s", blob(host), port, blob("node"))
	case "SENTINEL":
		host, port, _ = net.SplitHostPort(s.master)
		return "*2\r\n" + blob(host) + blob(port)
	}
	return "+OK\r\n"
}

// onlineMaster is a node of CLUSTER SHARDS, without an address.
const onlineMaster = "%3\r\n+role\r\n+master\r\n+health\r\n+online\r\n+port\r\n:-1\r\n"

// lies are answers that end a client which believes them, by a panic or for want of memory, and
// some that are true of another command.
func lies() (all [][]byte) {
	for kind := range strings.SplitSeq("* $ % ~ > | = ! ; ? + - : , # ( _ .", " ") {
		for length := range strings.SplitSeq(
			"9223372036854775807 -9223372036854775808 18446744073709551617 9999999999 1000000 -1 -2 00 0 1 3 ? t x",
			" ") {
			all = append(all, []byte(kind+length+"\r\n"))
		}
	}
	long := strings.Repeat("x", 4<<20)
	for _, text := range []string{
		"", "\n", "\r\n", "$1\r\nxy\r\n", "$5\r\nx", ":1\n:1\r\n", "+a\rb\r\n", "+OK\r\n+OK\r\n+OK\r\n",
		strings.Repeat("+OK\r\n", 100), strings.Repeat("*1\r\n", 1000), strings.Repeat("|0\r\n", 100_000),
		strings.Repeat("*1000\r\n", 1000), strings.Repeat("%1000\r\n$1\r\na\r\n", 1000),
		"$?\r\n" + strings.Repeat(";1000\r\n"+long[:1000]+"\r\n", 1000), "*?\r\n" + strings.Repeat("+\r\n", 100_000),
		"$?\r\n;-1\r\n", "$4194304\r\n" + long + "\r\n", "+" + long + "\r\n", "-" + long + "\r\n", long, "*2\r\n:1",
		">2\r\n+invalidate\r\n*-1\r\n", ">3\r\n+subscribe\r\n+x\r\n:1\r\n", ">3\r\n+message\r\n++sentinel\r\n+x\r\n",
		">2\r\n+a\r\n+b\r\n", "*3\r\n+subscribe\r\n+x\r\n:1\r\n", "+QUEUED\r\n", "-MOVED\r\n", "-MOVED 1\r\n",
		"-ASK\r\n",
		"-ERR ASK\r\n", "-ERR MOVED x\r\n", "-MOVED 1 127.0.0.1:1\r\n", "-ASK 1 :\r\n", "-NOAUTH\r\n", "-\r\n",
		"*0\r\n",
		"*1\r\n+x\r\n", "*2\r\n*0\r\n*0\r\n", "*2\r\n$-1\r\n$-1\r\n", "*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n+\r\n:-1\r\n",
		"*1\r\n*3\r\n:-5\r\n:99999999\r\n*2\r\n+?\r\n:1\r\n", "*1\r\n%1\r\n+nodes\r\n*1\r\n%1\r\n+role\r\n+master\r\n",
		"*1\r\n%2\r\n+slots\r\n*3\r\n:-5\r\n:99999999\r\n:1\r\n+nodes\r\n*1\r\n" + onlineMaster,
		"*2\r\n" + strings.Repeat("%2\r\n+slots\r\n+\r\n+nodes\r\n*2\r\n"+onlineMaster+onlineMaster, 2),
		"%1\r\n+proto\r\n:2\r\n", "%1\r\n+version\r\n+6.0\r\n", "%1\r\n*0\r\n*0\r\n",
		"-ERR unknown command 'HELLO'\r\n",
	} {
		all = append(all, []byte(text))
	}
	return all
}

// believe makes each call to a store one of whose answers is a lie, and expects the store to serve
// after it without having taken much memory.
func believe(t *testing.T, kind, honest int, lie []byte) {
	s, mode := newLiar(t, honest, lie), Mode(kind%3)
	s.shards = kind/3%2 == 1
	o := Options{
		Mode: mode, Addresses: []string{s.addr}, DialTimeout: time.Second, Silence: 100 * time.Millisecond,
	}
	if mode == Sentinel {
		o.MasterName = "m"
	}
	before := servertest.Allocated()
	store, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	items, all := pooltest.Blocks(0, 3, 64<<10), make([]pool.Status, 3)
	keys := []pool.Key{items[0].Key, items[1].Key, items[2].Key}
	pooltest.Until(t, "the server has lied", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		for range 2 {
			_ = store.Put(ctx, items)
			_ = store.Get(ctx, pooltest.Empty(items))
			_ = store.Exists(ctx, keys, all)
			_ = store.Delete(ctx, keys)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.honest < 0
	})
	if took := servertest.Allocated() - before; took > servertest.MaxAllocated {
		t.Errorf("wrong answer %.60q after %d answers: %d bytes were allocated", lie, honest, took)
	}
	items = pooltest.Blocks(10, 3, 64<<10) // the server may have said of others that it stored them
	pooltest.Until(t, "the store serves again", func() bool {
		return store.Put(t.Context(), items) == nil && store.Get(t.Context(), pooltest.Empty(items)) == nil &&
			store.State() == remote.OK
	})
	pooltest.Want(t, store, pool.OK, items...)
}

// TestServerLies gives wrong answers, each in place of another right one.
func TestServerLies(t *testing.T) {
	for i, lie := range lies() {
		if testing.Short() && i%7 != 0 {
			continue
		}
		t.Run(strconv.Itoa(i), func(t *testing.T) { believe(t, i, i%23, lie) })
	}
}

// FuzzServer is the same for anything.
func FuzzServer(f *testing.F) {
	f.Add(byte(0), byte(5), []byte("*1000000\r\n"))
	f.Fuzz(func(t *testing.T, kind, honest byte, lie []byte) { believe(t, int(kind), int(honest), lie) })
}

// TestAnswersAreBounded reads what each kind of answer may be, and what it may not, from a
// connection that returns one byte at a time.
func TestAnswersAreBounded(t *testing.T) {
	get := "*4\r\n$8\r\nGETRANGE\r\n$1\r\nk\r\n$1\r\n0\r\n$2\r\n99\r\n"
	for _, c := range []struct {
		asked, answer string
		valid         bool
	}{
		{get, blob(strings.Repeat("x", 100)), true},
		{get, blob(strings.Repeat("x", 100+slack)), false},
		{get, "-ERR " + strings.Repeat("x", 500) + "\r\n", true},
		{get, "*9\r\n" + strings.Repeat(":1\r\n", 9), false},
		{get + get, blob("x") + blob("y"), true},
		{get, blob("x") + blob("y"), false},
		{"*1\r\n$4\r\nPING\r\n", "*2\r\n$-1\r\n*1\r\n%1\r\n+k\r\n=5\r\ntxt:a\r\n", true},
		{"*1\r\n$4\r\nPING\r\n", strings.Repeat("*1\r\n", maxDepth+1) + ":1\r\n", false},
	} {
		ours, theirs := net.Pipe()
		b := &bounded{Conn: ours, all: &connections{}, in: bufio.NewReaderSize(iotest.OneByteReader(ours), readBuffer)}
		go func() {
			_, _ = io.ReadFull(theirs, make([]byte, len(c.asked)))
			_, _ = theirs.Write([]byte(c.answer))
			theirs.Close()
		}()
		for i := range c.asked {
			if _, err := b.Write([]byte(c.asked[i : i+1])); err != nil {
				t.Fatal(err)
			}
		}
		var got bytes.Buffer
		_, err := got.ReadFrom(b)
		if valid := err == nil && got.String() == c.answer; valid != c.valid {
			t.Errorf("%.40q, answered with %.40q: %v after %d bytes", c.asked, c.answer, err, got.Len())
		}
		b.Close()
	}
}

// TestConnectionsAreBounded expects a cluster that names any number of nodes not to be connected to
// all of them.
func TestConnectionsAreBounded(t *testing.T) {
	s := newLiar(t, -1, nil)
	o := Options{Addresses: []string{s.addr}, Mode: Cluster}
	if err := o.complete(); err != nil {
		t.Fatal(err)
	}
	c, all := o.client()
	dial := func() (net.Conn, error) { return c.DialCtxFn(t.Context(), s.addr, &c.Dialer, nil) }
	var open []net.Conn
	for range maxConnections + o.Concurrency {
		nc, err := dial()
		if err != nil {
			t.Fatalf("after %d connections: %v", len(open), err)
		}
		open = append(open, nc)
		defer nc.Close()
	}
	if _, err := dial(); err == nil {
		t.Fatalf("%d connections, and one more", len(open))
	}
	open[0].Close()
	open[0].Close()
	if nc, err := dial(); err != nil {
		t.Errorf("after one was closed: %v", err)
	} else {
		defer nc.Close()
	}
	if _, err := dial(); err == nil {
		t.Error("a connection that was closed twice counts twice")
	}
	all.close()
	if _, err := dial(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after the client was closed: %v", err)
	}
	if _, err := open[1].Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("an open connection after the client was closed: %v", err)
	}
}

// TestSentinelsNameAnotherMaster expects a store to go to the master that the sentinels name.
func TestSentinelsNameAnotherMaster(t *testing.T) {
	sentinel, first, second := newLiar(t, -1, nil), servertest.Redis(t), servertest.Redis(t)
	sentinel.master = first.Addr
	s := openOn(t, Options{Addresses: []string{sentinel.addr}, Mode: Sentinel, MasterName: "m"})
	pooltest.Put(t, s, pool.OK, pooltest.Block(1, 100))
	sentinel.mu.Lock()
	sentinel.master = second.Addr
	sentinel.mu.Unlock()
	there := openOn(t, Options{Addresses: []string{second.Addr}})
	pooltest.Until(t, "blocks are stored at the other master", func() bool {
		_ = s.Put(t.Context(), pooltest.Blocks(2, 1, 100))
		return pooltest.Get(t, there, pooltest.Block(2, 100))[0] == pool.OK
	})
}
