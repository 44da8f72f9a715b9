package ipc

import (
	"context"
	"errors"
	"fmt"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

const helperPathEnv = "KVAGENT_IPC_TEST_SOCKET"

// helperMain is the peer: it opens a session, has a child hold its socket open, says so by a PING,
// and waits to be killed.
func helperMain(path string) {
	c, _, err := DialSession(context.Background(), path, "helper")
	if err == nil {
		var f *os.File
		f, err = c.uc.File()
		if err == nil {
			child := exec.Command("sleep", "60")
			child.ExtraFiles = []*os.File{f}
			if err = child.Start(); err == nil {
				err = c.Send(&Ping{Req: uint32(child.Process.Pid)})
			}
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	c.Recv()
}

// startHelper gives our end of a session with a killed-to-be process, and its child that holds the
// socket. accepted is whether our end behaves as an agent's, or as a client's whose agent is the
// helper.
func startHelper(t *testing.T, accepted bool) (agent *Conn, helper *exec.Cmd, child *os.Process) {
	t.Helper()
	path := filepath.Join(socketDir(t), socketdir.Session)
	l, err := socketdir.Listen(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	helper = exec.Command(os.Args[0])
	helper.Env = append(os.Environ(), helperPathEnv+"="+path)
	helper.Stderr = os.Stderr
	if err := helper.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { helper.Process.Kill(); helper.Wait() })
	uc, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	if agent, err = NewConn(uc, accepted); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { agent.Close() })
	if _, err := ServeHandshake(agent, Welcome{}); err != nil {
		t.Fatal(err)
	}
	m, _, err := agent.Recv()
	if err != nil {
		t.Fatal(err)
	}
	child, err = os.FindProcess(int(m.(*Ping).Req))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { child.Kill() })
	return agent, helper, child
}

// A peer that is killed is noticed at once though its child holds the socket open.
func TestKilledPeer(t *testing.T) {
	const within, tries = time.Second, 5 // one of them: a machine may stand still
	var took []time.Duration
	for range tries {
		took = append(took, noticed(t))
		if took[len(took)-1] <= within {
			return
		}
	}
	t.Errorf("noticed after %v, want milliseconds", took)
}

// noticed kills a peer and gives the time until that was noticed.
func noticed(t *testing.T) time.Duration {
	t.Helper()
	agent, helper, _ := startHelper(t, true)
	if agent.pidfd == nil {
		t.Skip("this kernel has no pidfd")
	}
	if agent.Peer().Pid != helper.Process.Pid {
		t.Errorf("peer %d, want %d", agent.Peer().Pid, helper.Process.Pid)
	}
	recv := make(chan error, 1)
	go func() {
		_, _, err := agent.Recv()
		recv <- err
	}()
	start := time.Now()
	helper.Process.Kill()
	select {
	case <-agent.Dead():
	case <-time.After(testTimeout):
		t.Fatal("the death was not noticed")
	}
	took := time.Since(start)
	if !errors.Is(agent.Cause(), ErrPeerDied) {
		t.Errorf("cause %v, want ErrPeerDied", agent.Cause())
	}
	select {
	case err := <-recv:
		if !errors.Is(err, ErrPeerDied) {
			t.Errorf("Recv: %v, want ErrPeerDied", err)
		}
	case <-time.After(testTimeout):
		t.Fatal("Recv did not return")
	}
	return took
}

// At the client's end only the end of the socket ends Recv: a living child of the agent may still
// touch memory.
func TestKilledAgent(t *testing.T) {
	client, helper, child := startHelper(t, false)
	recv := make(chan error, 1)
	go func() {
		_, _, err := client.Recv()
		recv <- err
	}()
	helper.Process.Kill()
	if client.pidfd != nil {
		select {
		case <-client.Dead():
		case <-time.After(testTimeout):
			t.Fatal("the death was not noticed")
		}
	}
	if client.pidfd != nil {
		noticed(t) // a later death, which ends a Recv
	}
	select {
	case err := <-recv:
		t.Fatalf("Recv ended before the socket: %v", err)
	default:
	}
	child.Kill()
	select {
	case err := <-recv:
		if err != io.EOF {
			t.Errorf("Recv: %v, want EOF", err)
		}
	case <-time.After(testTimeout):
		t.Fatal("Recv did not return")
	}
}
