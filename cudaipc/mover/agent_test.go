package mover_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// agentEnv is set in a process that plays an agent with a mover, to its device: see TestAgentDies.
const agentEnv = "KVAGENT_MOVER_TEST_AGENT"

// playAgent imports a peer whose proof is descriptor 3 into a mover, tells the mover's process, and
// waits for its death.
func playAgent() {
	device := os.Getenv(agentEnv)
	if device == "" {
		return
	}
	if err := agentWithMover(device); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
	select {}
}

func agentWithMover(device string) error {
	arena, err := unix.MemfdCreate("arena", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(arena, 1<<20)
	}
	if err != nil {
		return err
	}
	if err := os.Unsetenv(agentEnv); err != nil {
		return err
	}
	m, err := mover.New(mover.Options{
		Device: device, ArenaFD: arena, ArenaSize: 1 << 20, Command: devicetest.MoverCommand, Env: devicetest.MoverEnv,
		Node: -1,
	})
	if err != nil {
		return err
	}
	im := cudaipc.Import{Proof: 3, Regions: []cudaipc.Region{{ID: 1, Kind: cudaipc.KindFD, Size: 1 << 20}}}
	unix.CloseOnExec(im.Proof)
	if im.Regions[0].FD, err = unix.FcntlInt(uintptr(arena), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return err
	}
	p, err := m.Import(im)
	if err != nil {
		return err
	}
	c := cudaipc.Copy{Runs: []cudaipc.Run{{Region: 1, Len: 4096}}, Blocks: []cudaipc.Block{{Runs: 1}}}
	if _, err := p.Copy(&c); err != nil {
		return err
	}
	fmt.Println(m.Movers()[0].PID)
	return nil
}

// startAgent starts playAgent and gives its process, its mover's, and the far end of the proof.
func startAgent(t *testing.T, device string) (agent *exec.Cmd, mover int, proof *os.File) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	proof = os.NewFile(uintptr(pair[0]), "proof")
	t.Cleanup(func() { _ = proof.Close() })
	theirs := os.NewFile(uintptr(pair[1]), "proof")
	defer theirs.Close()
	agent = exec.Command("/proc/self/exe")
	agent.Env, agent.Stderr, agent.ExtraFiles = append(os.Environ(), agentEnv+"="+device), os.Stderr, []*os.File{theirs}
	out, err := agent.StdoutPipe()
	if err == nil {
		err = agent.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 32)
	n, _ := out.Read(line)
	if mover, err = strconv.Atoi(string(line[:max(n-1, 0)])); err != nil {
		_ = agent.Process.Kill()
		_ = agent.Wait()
		t.Fatalf("the agent said %q", line[:n])
	}
	return agent, mover, proof
}

// ended waits for the end of a proof; 0 asks without waiting.
func ended(t *testing.T, proof int, within time.Duration) bool {
	t.Helper()
	if !readable(t, proof, within) {
		return false
	}
	got, err := unix.Read(proof, make([]byte, 1))
	return got == 0 && (err == nil || errors.Is(err, io.EOF))
}

// readable waits until a descriptor can be read, as a pidfd can when its process has ended.
func readable(t *testing.T, fd int, within time.Duration) bool {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for end := time.Now().Add(within); ; {
		n, err := unix.Poll(fds, max(int(time.Until(end).Milliseconds()), 0))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return n > 0
	}
}
