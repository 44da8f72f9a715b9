package crc32c

// form is one way of summing that this machine has; use switches to it until the returned
// function is called.
type form struct {
	name string
	use  func() func()
}

func forms() []form {
	set := func(vector, wide bool) func() func() {
		return func() func() {
			oldFast, oldWide := fast, has512
			fast, has512 = vector, wide
			return func() { fast, has512 = oldFast, oldWide }
		}
	}
	forms := []form{{"portable", set(false, false)}}
	if has128 {
		forms = append(forms, form{"128 bits", set(true, false)})
	}
	if has512 {
		forms = append(forms, form{"512 bits", set(true, true)})
	}
	return forms
}
