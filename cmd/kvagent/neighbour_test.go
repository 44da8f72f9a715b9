package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
)

// asNeighbour makes the test binary another user of the node, with the agent's sockets in the
// directory that it names.
const asNeighbour = "KVAGENT_TEST_AS_NEIGHBOUR"

const (
	stranger     = 54321 // the user and group of a neighbour
	fewSessions  = 64
	turns        = 20 // how often it takes a lost connection's place
	more         = 2  // times as many connections as the agent serves
	halfARequest = "GET /livez HTTP/1.1\r\n"
)

// TestNeighbourKeepsNobodyOut: a user of the socket's group who takes every connection of every
// socket that it can get keeps neither probes nor the owner's commands, sessions and look-ups out.
func TestNeighbourKeepsNobodyOut(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("LEFT OUT: only root can be another user; nothing here shows that a neighbour keeps nobody out")
	}
	t.Setenv(testLimits, "sessions="+strconv.Itoa(fewSessions))
	_, dir, _ := startServe(t, "--socket-group", strconv.Itoa(stranger))
	if err := os.Chmod(filepath.Dir(dir), 0o711); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), asNeighbour+"="+dir)
	said, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	line := make([]byte, len("full\n"))
	if _, err := io.ReadFull(said, line); err != nil || string(line) != "full\n" {
		t.Fatalf("the neighbour says %q: %v", line, err)
	}
	for _, args := range [][]string{
		{"check", "live"}, {"check", "ready"}, {"status"}, {"mock", "--requests", "20", "--lookup-timeout", "10s"},
	} {
		out, code := kvagentOutput(t, append(args, "--socket-dir", dir)...)
		if code != 0 || args[0] == "mock" && !strings.Contains(out, `"lookup_misses":0`) {
			t.Errorf("beside a neighbour: %v: exit %d: %s", args, code, out)
		}
	}
}

// neighbour takes more connections of each socket than the agent serves, again when it loses one,
// and says so when it has had all.
func neighbour(dir string) {
	for _, err := range []error{syscall.Setgroups(nil), syscall.Setgid(stranger), syscall.Setuid(stranger)} {
		if err != nil {
			panic(err)
		}
	}
	var had sync.WaitGroup
	for name, s := range map[string]struct {
		connections int
		hold        func(path string, took func()) // until it is lost
	}{
		socketdir.Admin:   {admin.MaxConns, says(halfARequest)},
		socketdir.Session: {fewSessions, session},
		socketdir.Lookup:  {ipc.MaxLookupPeers, says(zmtpGreeting)},
	} {
		for range more * s.connections {
			had.Add(1)
			go func() {
				took := sync.OnceFunc(had.Done)
				for range turns {
					s.hold(filepath.Join(dir, name), took)
					took() // or it was refused
				}
			}()
		}
	}
	had.Wait()
	fmt.Println("full")
	select {} // until it is killed
}

// zmtpGreeting is the greeting of a REQ socket and its READY.
var zmtpGreeting = "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + strings.Repeat("\x00", 48) +
	"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"

// says returns a function that connects, begins to speak, and waits for more.
func says(text string) func(string, func()) {
	return func(path string, took func()) {
		c, err := net.Dial("unix", path)
		if err != nil {
			return
		}
		defer c.Close()
		if _, err = io.WriteString(c, text); err == nil {
			took()
			_, _ = io.Copy(io.Discard, c)
		}
	}
}

// session opens a session, and does nothing in it.
func session(path string, took func()) {
	c, _, err := mockengine.DialSession(context.Background(), path, "neighbour")
	if err != nil {
		return
	}
	defer c.Close()
	took()
	for err == nil {
		_, _, err = c.Recv()
	}
}
