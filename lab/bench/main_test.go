package bench

import (
	"errors"
	"os"
	"os/exec"
	"testing"
)

// asCommand makes the test binary the command itself.
const asCommand = "KVAGENT_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) == "" {
		os.Exit(m.Run())
	}
	root := Command()
	root.SetArgs(os.Args[2:]) // after bench
	if root.Execute() != nil {
		os.Exit(1)
	}
}

// benchOutput runs a command of bench in a process of its own.
func benchOutput(t *testing.T, args ...string) (string, int) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), asCommand+"=1")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return string(out), exit.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(out), 0
}
