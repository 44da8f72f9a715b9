package ipc

import (
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	stoppedFrame = 200 * time.Millisecond // may take this long in the process that is stopped
	stoppedSends = 100
)

// TestConnStoppedWithinAFrame: a session outlives a stop of this process (SIGSTOP) in the middle of
// a frame, if the other side has done its part meanwhile.
func TestConnStoppedWithinAFrame(t *testing.T) {
	done := &Done{Status: make([]byte, MaxJobBlocks)}
	if os.Getenv("KVAGENT_STOPPED") != "" {
		c := stoppedConn(t)
		defer c.Close()
		for range stoppedSends {
			if err := c.Send(done); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := c.Recv(); err != nil {
			t.Fatal(err)
		}
		return
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	own, its := os.NewFile(uintptr(fds[0]), "own"), os.NewFile(uintptr(fds[1]), "its")
	defer own.Close()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env, cmd.ExtraFiles = append(os.Environ(), "KVAGENT_STOPPED=1"), []*os.File{its}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	its.Close()
	stopped := func(meanwhile func()) {
		time.Sleep(stoppedFrame / 8)
		_ = cmd.Process.Signal(syscall.SIGSTOP)
		meanwhile()
		time.Sleep(2 * stoppedFrame)
		_ = cmd.Process.Signal(syscall.SIGCONT)
	}
	sent, frame := int64(stoppedSends*len(frameOf(done))), frameOf(&Ping{Req: 1})
	begun, _ := io.CopyN(io.Discard, own, 1)
	stopped(func() {
		n, _ := io.CopyN(io.Discard, own, 64<<10)
		begun += n
	})
	if _, err := io.CopyN(io.Discard, own, sent-begun); err != nil {
		t.Errorf("the rest of what was sent: %v", err)
	}
	own.Write(frame[:lengthBytes+1])
	stopped(func() { own.Write(frame[lengthBytes+1:]) })
	text, _ := io.ReadAll(out)
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, text)
	}
}

func stoppedConn(t *testing.T) *Conn {
	f := os.NewFile(3, "session")
	defer f.Close()
	nc, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewConn(nc.(*net.UnixConn), true)
	if err != nil {
		t.Fatal(err)
	}
	c.times.frame, c.times.send = stoppedFrame, stoppedFrame
	return c
}
