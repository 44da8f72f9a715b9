package host

// moveForm is one way of moving that this machine has; use switches to it until the returned
// function is called.
type moveForm struct {
	name string
	use  func() func()
}

func moveForms() []moveForm {
	set := func(fast, wide bool) func() func() {
		return func() func() {
			oldFast, oldWide := fastMove, has512
			fastMove, has512 = fast, wide
			return func() { fastMove, has512 = oldFast, oldWide }
		}
	}
	forms := []moveForm{{"portable", set(false, false)}}
	if has128 {
		forms = append(forms, moveForm{"128 bits", set(true, false)})
	}
	if has512 {
		forms = append(forms, moveForm{"512 bits", set(true, true)})
	}
	return forms
}
