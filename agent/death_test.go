package agent

const (
	victimPhase = "KVAGENT_TEST_VICTIM_PHASE"
	victimDir   = "KVAGENT_TEST_VICTIM_DIR"
)

func victim(phase, dir string) {}
